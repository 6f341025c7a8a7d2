# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Optimizers, schedules, decay masks and the shardings of optimizer states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny import tiny_model

import jaxmodels
from train.errors import UserError
from train.experiment import MeshConfig, OptimizerConfig
from train.mesh import make_mesh, param_shardings, path_name
from train.optim import (
    build_optimizer,
    decay_mask,
    learning_rate_schedule,
    muon_dimensions,
    opt_state_shardings,
    updates_done,
)

OPTIMIZERS = ("adamw", "muon", "lion", "adafactor", "sgd")


def rates(steps=100, **changes):
    config = OptimizerConfig(**({"learning_rate": 0.5, "warmup_steps": 10} | changes))
    schedule = learning_rate_schedule(config, steps)
    return np.array([float(schedule(i)) for i in range(steps + 1)])


def test_cosine_is_exactly_optax():
    want = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 100, 0.05)
    np.testing.assert_array_equal(
        rates(final_learning_rate=0.05), [float(want(i)) for i in range(101)]
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_starts_at_zero_and_ends_at_the_peak(schedule):
    got = rates(schedule=schedule)
    assert got[0] == 0
    np.testing.assert_allclose(got[:11], 0.05 * np.arange(11), rtol=1e-6)
    assert rates(schedule=schedule, warmup_steps=0)[0] == 0.5


def test_linear_and_wsd_and_constant_after_warm_up():
    linear = rates(schedule="linear", final_learning_rate=0.05)
    np.testing.assert_allclose(linear[10:], np.linspace(0.5, 0.05, 91), rtol=1e-5)
    wsd = rates(schedule="wsd", final_learning_rate=0.05, wsd_decay_fraction=0.2)
    np.testing.assert_allclose(wsd[10:81], 0.5, rtol=1e-6)
    np.testing.assert_allclose(wsd[80:], np.linspace(0.5, 0.05, 21), rtol=1e-5)
    assert (rates(schedule="constant")[10:] == 0.5).all()


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"warmup_steps": 100}, "warmup_steps=100.*steps=100"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"schedule": "wsd", "wsd_decay_fraction": 0.0}, "wsd_decay_fraction=0.0"),
    ],
)
def test_a_schedule_that_makes_no_sense(changes, named):
    with pytest.raises(UserError, match=named):
        rates(**changes)


def masked(model, **changes):
    mask = decay_mask(OptimizerConfig(**changes), model.param_axes)
    return {path_name(p): m for p, m in jax.tree_util.tree_flatten_with_path(mask)[0]}


@pytest.mark.parametrize("mixer", ["attention", "ttt"])
def test_matrices_decay_and_scales_biases_and_factors_do_not(mixer):
    mask = masked(tiny_model(mixer, channel=jaxmodels.GeluMLP(d_ff=64)))
    decays = {name for name, value in mask.items() if value}
    expected = {"inputs/embedding", "blocks/channel/w_up", "blocks/channel/w_down"}
    expected |= {f"blocks/mixer/w{x}" for x in "qkvo"}
    if mixer == "ttt":
        expected |= {"blocks/mixer/lr_kernel", "blocks/mixer/inner_w"}
        assert {"blocks/mixer/inner_b", "blocks/mixer/position_offset"} <= set(mask)
    assert decays == expected


def test_decay_of_all_parameters_decays_all():
    assert all(masked(tiny_model("ttt"), decay_mask="all").values())


def test_adamw_is_exactly_optax():
    model = tiny_model()
    config = OptimizerConfig(clip_norm=None, learning_rate=0.1, warmup_steps=2)
    ours = build_optimizer(config, steps=10, param_axes=model.param_axes)
    theirs = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10, 0.0),
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        mask=decay_mask(config, model.param_axes),
    )
    params = model.init(jax.random.key(0))
    got, want = params, params
    ours_state, theirs_state = ours.init(params), theirs.init(params)
    for i in range(4):
        grads = jax.tree.map(lambda p: jnp.sin(p + i), params)  # noqa: B023
        updates, ours_state = ours.update(grads, ours_state, got)
        got = optax.apply_updates(got, updates)
        updates, theirs_state = theirs.update(grads, theirs_state, want)
        want = optax.apply_updates(want, updates)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert int(updates_done(ours_state)) == 4


def test_clipping_bounds_the_norm():
    model = tiny_model()
    config = OptimizerConfig(
        name="sgd", b1=0.0, clip_norm=1.0, weight_decay=0.0, warmup_steps=0, learning_rate=1.0
    )
    optimizer = build_optimizer(config, steps=10, param_axes=model.param_axes)
    params = model.init(jax.random.key(0))
    grads = jax.tree.map(lambda p: 100.0 * jnp.ones_like(p), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(float(optax.tree.norm(updates)), 1.0, rtol=1e-5)


def test_muon_sees_stacked_and_three_axis_weights_as_the_matrices_they_are():
    axes = tiny_model("ttt").param_axes
    dimensions = muon_dimensions(axes)
    block, mixer = dimensions["blocks"], dimensions["blocks"]["mixer"]
    assert mixer["wq"] == ((1,), (2, 3))  # (L, D, H, K): D -> H x K
    assert mixer["inner_w"] == ((2,), (3,))  # (L, H, K, K): one matrix per layer and head
    assert block["channel"]["w_up"] == ((1,), (2,))
    attention = muon_dimensions(tiny_model("attention").param_axes)["blocks"]["mixer"]
    assert attention["wo"] == ((1, 2), (3,))  # (L, H, K, D): H x K -> D
    assert dimensions["inputs"]["embedding"] is None  # to Adam
    assert mixer["inner_norm_scale"] is None and dimensions["final_norm"]["scale"] is None


def test_muon_orthogonalises_each_layer_by_itself():
    model = tiny_model()
    config = OptimizerConfig(
        name="muon", clip_norm=None, weight_decay=0.0, warmup_steps=0, learning_rate=1.0
    )
    optimizer = build_optimizer(config, steps=10, param_axes=model.param_axes)
    params = model.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    leaves, tree = jax.tree.flatten(params)
    grads = tree.unflatten([jax.random.normal(k, p.shape) for k, p in zip(keys, leaves)])
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    update = np.asarray(updates["blocks"]["mixer"]["wq"])
    L, D, H, K = update.shape
    for layer in range(L):
        matrix = update[layer].reshape(D, H * K) / (0.2 * np.sqrt(max(D, H * K)))
        # Newton-Schulz with the usual constants gives singular values around 1, not exactly 1.
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert singular.max() < 1.3 and np.median(singular) > 0.6
        grad = np.asarray(grads["blocks"]["mixer"]["wq"])[layer].reshape(D, H * K)
        assert np.sum(matrix * grad) < 0, "the update must go down the gradient"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_follow_the_parameters(name):
    model = tiny_model("attention", d_model=128, channel=jaxmodels.SwiGLU(d_ff=256))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    optimizer = build_optimizer(OptimizerConfig(name=name), steps=200, param_axes=model.param_axes)
    of_params = param_shardings(model, mesh)
    state = jax.eval_shape(optimizer.init, model.param_shapes)
    shardings = opt_state_shardings(state, model.param_shapes, of_params, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    named = {
        path_name(path): (leaf, sharding.spec)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(shardings)
        )
    }
    w_up = {n: v for n, v in named.items() if n.endswith("blocks/channel/w_up")}
    if name == "adafactor":
        by_field = {n.split("/")[-4]: v for n, v in w_up.items()}
        # (L 2, D 128, F 256) as (None, fsdp, tensor): v_row averages over F, v_col over D.
        assert by_field["v_row"][0].shape == (2, 128)
        assert by_field["v_row"][1] == P(None, "fsdp")
        assert by_field["v_col"][0].shape == (2, 256)
        assert by_field["v_col"][1] == P(None, "tensor")
        assert by_field["v"][0].shape == (1,)
    else:
        assert {spec for _, spec in w_up.values()} == {P(None, "fsdp", "tensor")}
        assert len(w_up) == {"adamw": 2, "muon": 1, "lion": 1, "sgd": 1}[name]
    # What is large is never replicated.
    assert all(
        leaf.size < 1000 or any(axis is not None for axis in spec) for leaf, spec in named.values()
    )


def test_a_state_that_no_rule_places_is_an_error():
    model = tiny_model()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    odd = {"mu": jax.tree.map(lambda p: jax.ShapeDtypeStruct((7,), p.dtype), model.param_shapes)}
    with pytest.raises(UserError, match=r"mu/.* has shape \(7,\)"):
        opt_state_shardings(odd, model.param_shapes, param_shardings(model, mesh), mesh)


@pytest.mark.parametrize(
    "changes, named", [({"name": "adam"}, "'adam'"), ({"clip_norm": 0.0}, "clip_norm=0.0")]
)
def test_unknown_settings(changes, named):
    with pytest.raises(UserError, match=named):
        build_optimizer(OptimizerConfig(**changes), steps=200, param_axes={})
