# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Every installed config makes an experiment; the published ones have the published recipe."""

import pytest

import jaxmodels
from train.cli import config_names, load_experiment
from train.loop import build_model, check_settings

# Spec section 7, published in the paper's appendix C: steps, peak rate, warm-up.
RECIPES = {
    "125m": (4_800, 3e-3, 480),
    "350m": (13_500, 1.5e-3, 1_350),
    "760m": (29_000, 1.25e-3, 2_900),
    "1.3b": (50_000, 1e-3, 5_000),
}


@pytest.mark.parametrize("name", config_names())
def test_configs_are_possible(name):
    experiment = load_experiment(name)
    build_model(experiment)
    check_settings(experiment)


@pytest.mark.parametrize("preset", jaxmodels.ttt.PRESETS)
def test_published_ttt_recipes(preset):
    experiment = load_experiment(preset.replace("-", "_").replace(".", "_"))
    assert experiment.model.mixer == jaxmodels.PRESETS[preset].mixer
    optimizer = experiment.optimizer
    got = experiment.steps, optimizer.learning_rate, optimizer.warmup_steps
    assert got == RECIPES[preset.split("-")[2]]
    assert experiment.batch_size * experiment.sequence_length == 2**19
    assert (optimizer.b1, optimizer.b2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert (optimizer.final_learning_rate, optimizer.decay_mask) == (1e-5, "all")
    warm = experiment.inner_lr
    if "mlp" in preset:
        assert (warm.start, warm.warmup_steps) == (0.1, optimizer.warmup_steps)
    else:
        assert not warm.active
