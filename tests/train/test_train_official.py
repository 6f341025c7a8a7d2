# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The train step against the official JAX training code of TTT: losses, norms, rates and parameters
over several steps (tolerances of the goldens' README)."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from measure import max_abs

import jaxmodels
from jaxmodels import ttt
from train.experiment import Experiment, InnerLRConfig, LossConfig, MeshConfig, OptimizerConfig
from train.mesh import make_mesh
from train.step import make_trainer

ONE, EIGHT, FOUR = {}, dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, tensor=2)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
    ("jax_train_linear_mamba", ONE),
    slow("jax_train_linear_mamba", EIGHT),
    ("jax_train_mlp_mamba", ONE),
    ("jax_train_mlp_mamba", EIGHT),
    ("jax_train_mlp_base_accum2", ONE),
    slow("jax_train_mlp_base_accum2", FOUR),
]


def official_experiment(config, model):
    """The official optimizer flags as an experiment."""
    warm = {}
    if config["ttt_base_lr_init"] > 0:
        start = config["ttt_base_lr_init"] / config["ttt_base_lr"]
        warm = dict(start=start, warmup_steps=config["ttt_base_lr_warmup"])
    meta = config["_meta"]
    return Experiment(
        name="official",
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=config["opt_lr"],
            warmup_steps=config["opt_lr_warmup_steps"],
            final_learning_rate=config["opt_end_lr"],
            b1=config["opt_b1"],
            b2=config["opt_b2"],
            weight_decay=config["opt_weight_decay"],
            decay_mask="all",
            clip_norm=config["opt_clip_gradient"],
        ),
        loss=LossConfig(reduction="rows", ignore_token=1),
        inner_lr=InnerLRConfig(**warm),
        steps=config["opt_lr_decay_steps"],
        batch_size=meta["B"],
        sequence_length=meta["L"],
        accumulation_steps=config["accum_steps"],
    )


@pytest.mark.parametrize("name, axes", CASES)
def test_steps_match_the_official_training_code(golden, name, axes):
    file = golden(f"ttt/{name}")
    config = json.loads(str(file["config"]))
    weights = {k.removeprefix("param/"): v for k, v in file.items() if k.startswith("param/")}
    model_config, params = ttt.from_official(config, weights)
    experiment = official_experiment(config, model_config)
    devices = jax.devices()[: math.prod(axes.values())]
    trainer = make_trainer(
        experiment,
        jaxmodels.build(model_config),
        make_mesh(MeshConfig(**axes), devices=devices),
    )
    state = trainer.init(jax.random.key(0))
    state["params"] = jax.device_put(params, trainer.shardings["params"])
    for step in range(config["steps"]):
        targets = file["in/target_tokens"][step]
        np.testing.assert_array_equal(targets != 1, file["in/loss_masks"][step] > 0)
        batch = {
            "tokens": file["in/input_tokens"][step],
            "targets": targets,
            "weights": np.ones(targets.shape, np.float32),
        }
        batch = {k: jax.device_put(v, trainer.batch_sharding) for k, v in batch.items()}
        state, metrics = trainer.step(state, batch)
        assert abs(metrics["loss"] - file["out/loss"][step]) < 5e-6
        norm = file["out/grad_norm"][step]
        assert abs(metrics["grad_norm"] - norm) < 5e-6 * norm
        # The official log shows the rate of the update that comes next. Without the compiler's
        # optimisations (see conftest) its last bit may differ; with them it does not.
        rate = np.float32(file["out/logged_lr"][step - 1] if step else 0)
        np.testing.assert_array_max_ulp(np.float32(metrics["learning_rate"]), rate, maxulp=1)
        scale = metrics.get("inner_lr_scale", 1.0)
        assert np.float32(scale) == file["out/ttt_lr_mult"][step]
    final = ttt.to_official(model_config, jax.device_get(state["params"]), layout="flax")
    wanted = {k.removeprefix("out/final_param/"): v for k, v in file.items() if "final_param" in k}
    assert final.keys() == wanted.keys()
    for key, value in wanted.items():
        assert max_abs(final[key], value) < 1e-5, key
