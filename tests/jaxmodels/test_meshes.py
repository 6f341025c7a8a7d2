# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Models and single layers run with no mesh, under Auto, under Explicit and inside the caller's
shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import max_abs
from small_models import MIXERS, tiny, tokens

import jaxmodels

mixers = pytest.mark.parametrize("mixer", MIXERS)
RULES = {"batch": "data", "sequence": None, "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def mesh_of(kind):
    return jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4]
    )


def shard(model, params, mesh):
    """Splits heads and MLP over 'tensor', as a training program would."""
    names = {"heads": "tensor", "mlp": "tensor"}
    axes = jax.tree.leaves(model.param_axes, is_leaf=lambda a: isinstance(a, tuple))
    leaves, tree = jax.tree.flatten(params)
    specs = [
        P(*(names.get(n) if s % 2 == 0 else None for n, s in zip(a, x.shape)))
        for a, x in zip(axes, leaves)
    ]
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(leaves, specs)]
    return jax.tree.unflatten(tree, placed)


def loss_and_output(model, params, x):
    out = model.apply(params, x)
    return jnp.mean(out**2), out


gradient = jax.jit(jax.grad(loss_and_output, argnums=1, has_aux=True), static_argnums=0)


@functools.cache
def single_device(mixer):
    """(model, params, tokens, output, gradients) with no mesh; compiling takes most of the time."""
    model, params = tiny(mixer)
    x = tokens(4, 13)
    grads, out = gradient(model, params, x)
    return model, params, x, out, grads


def same_grads(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert max_abs(a, b) < 2e-5 * (1 + float(jnp.max(jnp.abs(b))))


@mixers
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_a_mesh(mixer, kind):
    model, params, x, want, want_grad = single_device(mixer)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh), jaxmodels.sharding.use_rules(RULES):
        placed, rows = shard(model, params, mesh), jax.device_put(x, NamedSharding(mesh, P("data")))
        grads, out = gradient(model, placed, rows)
        assert out.sharding.spec[0] == "data"
        assert max_abs(out, want) < 2e-5
        same_grads(grads, want_grad)
        state = jax.jit(lambda p: model.init_state(p, 4, 13))(placed)
        step = jax.jit(lambda p, x, s: model.apply(p, x, state=s))
        first, state = step(placed, rows[:, :6], state)
        second, _ = step(placed, rows[:, 6:], state)
        assert max_abs(np.concatenate([first, second], 1), want) < 2e-5
        _, taps = jax.jit(lambda p, x: model.apply(p, x, taps=("mixer_in",)))(placed, rows)
        assert taps["mixer_in"].shape == (3, 4, 13, 32)


@mixers
def test_inside_the_callers_shard_map(mixer):
    model, params, x, want, want_grad = single_device(mixer)
    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(model.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))

    def loss(params):
        out = run(params, x)
        return jnp.mean(out**2), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert max_abs(out, want) < 2e-5
    same_grads(grads, want_grad)

    def read(params, x):
        state = model.init_state(params, x.shape[0], 13)
        first, state = model.apply(params, x[:, :6], state=state)
        return jnp.concatenate([first, model.apply(params, x[:, 6:], state=state)[0]], 1)

    run = jax.shard_map(read, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert max_abs(jax.jit(run)(params, x), want) < 2e-5


@mixers
def test_one_layer_alone(mixer):
    layer = MIXERS[mixer].build(32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 13, 32))
    want, none = layer(x)
    assert none is None and want.shape == x.shape
    state = layer.init_state(4, 13)
    first, state = layer(x[:, :6], state=state)
    second, state = layer(x[:, 6:], state=state)
    assert max_abs(np.concatenate([first, second], 1), want) < 1e-5
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, P("data"))
        out, _ = jax.jit(lambda layer, x: layer(x))(jax.device_put(layer, P()), rows)
        assert jax.typeof(out).sharding.spec[0] == "data"
        assert max_abs(out, want) < 1e-5


def test_an_unknown_activation_name_is_refused():
    with (
        jax.set_mesh(mesh_of(AxisType.Auto)),
        jaxmodels.sharding.use_rules({"batch": "data"}),
        pytest.raises(ValueError, match="no sharding rule"),
    ):
        jax.jit(lambda x: jaxmodels.sharding.constrain(x, "batch", "heads"))(jnp.ones((4, 4)))
