# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The train step: the same on every mesh, in every number of micro-batches, and safe from NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measure import max_rel
from tiny import LENGTH, ROWS, learnable_batch, random_batch, tiny_experiment, tiny_model

import jaxmodels
from jaxmodels.sharding import use_rules
from train.errors import UserError
from train.experiment import LossConfig, MeshConfig, OptimizerConfig
from train.mesh import RULES, make_mesh, param_shardings, to_global
from train.optim import updates_done
from train.step import check_traceable, ema_rate, gradients, make_eval_step, make_trainer

CUBE = MeshConfig(data=2, fsdp=2, tensor=2)


@functools.cache
def trainer(mixer="attention", *, cube=False, optimizer="adamw", model=None, **changes):
    """Compiled trainers are shared: compiling is what takes the time."""
    experiment = tiny_experiment(
        mixer,
        mesh=CUBE if cube else MeshConfig(),
        optimizer=OptimizerConfig(name=optimizer, learning_rate=1e-2, warmup_steps=2),
        **changes,
    )
    built = jaxmodels.build(model or experiment.model)
    mesh = make_mesh(experiment.mesh, None if cube else jax.devices()[:1])
    return make_trainer(experiment, built, mesh)


def run(trainer, batches, state=None):
    state = trainer.init(jax.random.key(0)) if state is None else state
    history = []
    for batch in batches:
        state, metrics = trainer.step(state, to_global(batch, trainer.batch_sharding, ROWS))
        history.append(metrics)
    return state, [{k: float(v) for k, v in m.items()} for m in history]


def same_sharding(got, want):
    assert got.sharding.is_equivalent_to(want, got.ndim), f"{got.sharding} is not {want}"


@pytest.mark.parametrize("mixer", ["attention", "ttt"])
def test_eight_devices_follow_one_device(mixer):
    batches = [random_batch(i, ragged=True) for i in range(20)]
    one, eight = trainer(mixer), trainer(mixer, cube=True)
    first = eight.init(jax.random.key(0))
    jax.tree.map(same_sharding, first, eight.shardings)
    _, want = run(one, batches)
    state, got = run(eight, batches, first)
    jax.tree.map(same_sharding, state, eight.shardings)
    for name in ("loss", "grad_norm", "weight", "learning_rate"):
        assert max_rel([m[name] for m in got], [m[name] for m in want]) < 1e-4, name


@pytest.mark.parametrize("mixer", ["attention", "ttt"])
def test_gradients_have_the_shardings_of_the_parameters(mixer):
    model, mesh = tiny_model(mixer), make_mesh(CUBE)
    eight = trainer(mixer, cube=True)
    batch = to_global(random_batch(0), eight.batch_sharding, ROWS)
    params = eight.init(jax.random.key(0))["params"]
    # No out_shardings here: what the gradient function itself decides is read.
    compute = jax.jit(lambda p, b: gradients(model, LossConfig(), p, b, mesh=mesh)[0])
    with jax.set_mesh(mesh), use_rules(RULES):
        grads = compute(params, batch)
    jax.tree.map(same_sharding, grads, param_shardings(model, mesh))
    embedding = grads["inputs"]["embedding"]
    assert embedding.addressable_shards[0].data.shape == (128, 16)


def test_the_mesh_does_not_change_the_random_parameters():
    one = trainer().init(jax.random.key(7))["params"]
    eight = trainer(cube=True).init(jax.random.key(7))["params"]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, eight
    )


Z_LOSS = LossConfig(z_loss=1e-3)


@pytest.mark.parametrize("cube, k", [(False, 4), (True, 2)])
def test_micro_batches_with_ragged_weights_equal_the_big_batch(cube, k):
    batch = random_batch(3, ragged=True)
    assert len(set(batch["weights"].sum(1))) > 4
    options = dict(cube=cube, loss=Z_LOSS, optimizer="sgd")
    state, metrics = run(trainer(**options, accumulation_steps=1), [batch] * 3)
    micro_state, micro_metrics = run(trainer(**options, accumulation_steps=k), [batch] * 3)
    for got, want in zip(micro_metrics, metrics):
        for name in ("loss", "grad_norm", "z_loss", "weight"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)
    for got, want in zip(jax.tree.leaves(micro_state["params"]), jax.tree.leaves(state["params"])):
        assert max_rel(got, want) < 1e-5


def test_the_loss_is_the_weighted_mean_over_the_batch():
    model = tiny_model()
    batch = random_batch(5, ragged=True)
    built = trainer(cube=False, loss=Z_LOSS, optimizer="sgd", accumulation_steps=1)
    state = built.init(jax.random.key(0))
    logits = model.apply(state["params"], batch["tokens"])
    nll, log_z = jaxmodels.losses.cross_entropy(logits, batch["targets"])
    w = batch["weights"]
    _, (metrics,) = run(built, [batch], state)
    np.testing.assert_allclose(metrics["loss"], np.sum(nll * w) / w.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["z_loss"], 1e-3 * np.sum(log_z**2 * w) / w.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["weight"], w.sum(), rtol=1e-6)


def test_the_mean_over_rows_without_the_ignored_token():
    model = tiny_model()
    batch = random_batch(5, ragged=True)
    batch["weights"][2] = 0  # a row that counts nowhere
    loss = LossConfig(reduction="rows", ignore_token=7)
    batch["targets"][:, ::9] = 7
    built = trainer(cube=False, loss=loss, optimizer="sgd", accumulation_steps=1)
    state = built.init(jax.random.key(0))
    logits = model.apply(state["params"], batch["tokens"])
    nll, _ = jaxmodels.losses.cross_entropy(logits, batch["targets"])
    w = batch["weights"] * (batch["targets"] != 7)
    rows = [np.sum(n * r) / r.sum() for n, r in zip(np.asarray(nll), w) if r.any()]
    assert len(rows) == len(w) - 1
    micro = trainer(cube=False, loss=loss, optimizer="sgd", accumulation_steps=2)
    (_, (micro_metrics,)) = run(micro, [batch])
    _, (metrics,) = run(built, [batch], state)
    for got in (metrics, micro_metrics):
        np.testing.assert_allclose(got["loss"], np.mean(rows), rtol=1e-5)
        np.testing.assert_allclose(got["weight"], w.sum(), rtol=1e-6)
        np.testing.assert_allclose(got["grad_norm"], metrics["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "adafactor", "sgd"])
def test_every_optimizer_trains(optimizer):
    rate = {"sgd": 0.5, "lion": 3e-3}.get(optimizer, 1e-2)
    experiment = tiny_experiment(
        optimizer=OptimizerConfig(name=optimizer, learning_rate=rate, warmup_steps=2), steps=30
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    built = make_trainer(experiment, jaxmodels.build(experiment.model), mesh)
    _, metrics = run(built, [learnable_batch(0)] * 30)
    losses = [m["loss"] for m in metrics]
    assert losses[-1] < 0.75 * losses[0], losses


def test_mixed_precision_keeps_float32_parameters():
    model = tiny_model(dtype="bfloat16").config
    built = trainer(model=model)
    state, metrics = run(built, [learnable_batch(0)] * 15)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.2
    kinds = {leaf.dtype for leaf in jax.tree.leaves((state["params"], state["opt_state"]))}
    assert kinds <= {np.dtype("float32"), np.dtype("int32")}


def poisoned(state):
    """The state with one NaN among the parameters."""
    bad = jax.tree.map(lambda x: x, state)
    scale = bad["params"]["final_norm"]["scale"]
    bad["params"]["final_norm"]["scale"] = scale.at[3].set(jnp.nan)
    return bad


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_step():
    built = trainer(ema_decay=0.9)
    state, _ = run(built, [random_batch(0)])
    bad = poisoned(state)
    before = jax.tree.map(np.array, bad)
    after, (metrics,) = run(built, [random_batch(1)], bad)
    assert metrics["non_finite"] == 1
    for part in ("params", "opt_state", "ema"):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), after[part], before[part]
        )
    assert int(after["step"]) == int(before["step"]) + 1
    assert int(updates_done(after["opt_state"])) == 1


def test_a_finite_step_is_not_flagged_and_counts():
    state, metrics = run(trainer(ema_decay=0.9), [random_batch(i) for i in range(3)])
    assert [m["non_finite"] for m in metrics] == [0, 0, 0]
    assert int(state["step"]) == int(updates_done(state["opt_state"])) == 3
    # The first update of a warm-up has rate 0, then 1/2 of the peak.
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [0, 5e-3, 1e-2], rtol=1e-6)


def test_the_moving_average_follows_its_formula():
    built = trainer(ema_decay=0.9)
    state = built.init(jax.random.key(0))
    want = np.asarray(state["ema"]["inputs"]["embedding"])
    for i in range(4):
        state, _ = run(built, [random_batch(i)], state)
        rate = min(0.9, (1 + i) / (10 + i))
        want = rate * want + (1 - rate) * np.asarray(state["params"]["inputs"]["embedding"])
    np.testing.assert_allclose(
        np.asarray(state["ema"]["inputs"]["embedding"]), want, rtol=1e-6, atol=1e-8
    )
    assert float(ema_rate(0.9, jnp.int32(1000))) == np.float32(0.9)


def test_evaluation_sums_are_those_of_the_losses():
    model, batch = tiny_model(), random_batch(2, ragged=True)
    params = trainer().init(jax.random.key(0))["params"]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step, sharding = make_eval_step(model, LossConfig(chunk=16), mesh, ROWS, LENGTH)
    nll, weight, _ = step(params, to_global(batch, sharding, ROWS))
    logits = model.apply(params, batch["tokens"])
    want = np.sum(jaxmodels.losses.cross_entropy(logits, batch["targets"])[0] * batch["weights"])
    np.testing.assert_allclose(float(nll), want, rtol=1e-5)
    np.testing.assert_allclose(float(weight), batch["weights"].sum(), rtol=1e-6)


def test_micro_batches_that_do_not_divide_over_the_mesh():
    experiment = tiny_experiment(mesh=CUBE, accumulation_steps=4)
    with pytest.raises(UserError, match="accumulation_steps=4 gives 2 rows"):
        make_trainer(experiment, jaxmodels.build(experiment.model), make_mesh(CUBE))


def test_what_the_model_refuses_is_told_in_its_words():
    mixer = jaxmodels.TTTLinear(num_heads=2, implementation="abacus")
    experiment = tiny_experiment(mixer)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(UserError, match=r"cannot read such batches.*'abacus'"):
        check_traceable(experiment, jaxmodels.build(experiment.model), mesh)
    fine = tiny_experiment("attention", data={"packing": "documents"})
    check_traceable(fine, jaxmodels.build(fine.model), mesh)


def test_a_mesh_axis_that_the_model_cannot_use_is_an_error():
    config = MeshConfig(expert=2)
    experiment = tiny_experiment(mesh=config)
    with pytest.raises(UserError, match=r"mesh.expert=2.*--mesh.expert 1"):
        make_trainer(experiment, jaxmodels.build(experiment.model), make_mesh(config))
