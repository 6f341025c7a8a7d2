# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The TPU kernels of both TTT operations against the token-by-token reference.

They run in Pallas' plain interpreter or in that for the TPU, slower, which plays the copies between
its memories; in both, memory is NaN until it is written.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from measure import max_rel, rms_rel

from pallas_kernels.ttt_common import pallas_tpu as common
from pallas_kernels.ttt_linear import TTTLinearState, ttt_linear
from pallas_kernels.ttt_linear import pallas_tpu as linear_tpu
from pallas_kernels.ttt_mlp import TTTMLPState, ttt_mlp
from pallas_kernels.ttt_mlp import pallas_tpu as mlp_tpu

OPS = {"linear": (ttt_linear, TTTLinearState), "mlp": (ttt_mlp, TTTMLPState)}
NAMES = ("q", "k", "v", "lr", "pos_scale", "weights", "ln_scale", "ln_bias")


@pytest.fixture(autouse=True)
def plain_interpreter(monkeypatch):
    call = functools.partial(common.pl.pallas_call, interpret=True)
    monkeypatch.setattr(common.pl, "pallas_call", call)


def tpu_interpreter():
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))


def arrays(op, B, H, T, K, b, F=None, dtype="float32", seed=0):
    draw = np.random.default_rng(seed).standard_normal
    normal = lambda *shape: jnp.asarray(draw(shape, np.float32))
    F = F or 4 * K
    weights = [(K, K), (K,)] if op == "linear" else [(K, F), (F,), (F, K), (K,)]
    return (
        *(normal(B, H, T, K).astype(dtype) for _ in range(3)),
        (1.0 if op == "linear" else 0.1) * jax.nn.sigmoid(normal(B, H, T)) / K,
        1 / jnp.arange(1, b + 1) + 0.05 * normal(b),
        tuple(0.1 * normal(B, H, *shape) for shape in weights),
        1 + 0.2 * normal(H, K),
        0.2 * normal(H, K),
    )


def run(op, implementation, q, k, v, lr, pos_scale, weights, *norm, **options):
    """Outputs and last weights."""
    function, State = OPS[op]
    state = State(*weights, *(jnp.zeros_like(x) for x in weights))
    out, state = function(
        q, k, v, lr, pos_scale, state, *norm, implementation=implementation, **options
    )
    return out, tuple(state)[: len(weights)]


def with_gradients(op, implementation, inputs, **options):
    """Outputs, last weights and the gradients of fixed cotangents on both."""
    call = functools.partial(run, op, implementation, **options)

    @jax.jit
    def all_of_it(inputs):
        result, vjp = jax.vjp(call, *inputs)
        draw = np.random.default_rng(1).standard_normal
        d_result = jax.tree.map(lambda x: jnp.asarray(draw(x.shape), x.dtype), result)
        return result, dict(zip(NAMES, vjp(d_result)))

    return all_of_it(inputs)


def assert_close(got, want, distance, limit):
    got, want = (jax.tree_util.tree_leaves_with_path(x) for x in (got, want))
    far = {}
    for (path, x), (_, y) in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, jax.tree_util.keystr(path)
        far[jax.tree_util.keystr(path)] = float(distance(x, y))
    assert all(x < limit for x in far.values()), far


SIZES = {  # B, H, T, K, b, checkpoint_every
    "two heads fill the lanes": (1, 2, 88, 64, 16, 2),
    "K = 96, b = 64": (1, 1, 128, 96, 64, 16),
    "three heads in a pack, two packs": (2, 3, 29, 40, 4, 3),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_float32_value_and_every_gradient(op, size):
    *shape, every = SIZES[size]
    inputs = arrays(op, *shape)
    with tpu_interpreter() if op == "linear" else contextlib.nullcontext():
        got = with_gradients(op, "pallas_tpu", inputs, checkpoint_every=every)
    want = with_gradients(op, "reference", inputs)
    assert_close(got, want, max_rel, 5e-6)


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_value_and_every_gradient(op):
    """Three heads, which do not pair up."""
    inputs = arrays(op, 1, 3, 48, 64, 16, dtype="bfloat16")
    got = with_gradients(op, "pallas_tpu", inputs, checkpoint_every=2)
    want = with_gradients(op, "reference", inputs)
    assert_close(got, want, rms_rel, 1e-2)


def test_a_group_whose_states_do_not_fit_is_recomputed_in_two_levels(monkeypatch):
    inputs = arrays("linear", 1, 2, 5 * 8, 64, 8)
    columns = ((64, 64), (1, 64))
    budget = common.backward_bytes(common._Sizes(2, 1, 8, 64, columns, jnp.float32), 2)
    monkeypatch.setattr(common, "BLOCK_BUDGET", budget)
    calls = []
    forward = common.forward
    monkeypatch.setattr(common, "forward", lambda *x, **y: calls.append(y) or forward(*x, **y))
    got = with_gradients("linear", "pallas_tpu", inputs, checkpoint_every=5)
    assert [call["every"] for call in calls] == [5, 2]
    want = with_gradients("linear", "reference", inputs)
    assert_close(got, want, max_rel, 5e-6)


def test_inside_vmap_scan_and_remat():
    """Two members, two layers: the output of one layer is the query of the next."""
    members = [arrays("linear", 1, 2, 24, 8, 8, seed=seed) for seed in range(2)]
    inputs = jax.tree.map(lambda *x: jnp.stack(x), *members)

    def loss(implementation, q, *rest):
        @jax.checkpoint
        def layer(q, _):
            return run("linear", implementation, q, *rest, checkpoint_every=2)[0], None

        return jnp.sum(jax.lax.scan(layer, q, None, length=2)[0] ** 2)

    def gradients(implementation):
        grad = jax.grad(functools.partial(loss, implementation), range(len(NAMES)))
        return jax.jit(jax.vmap(grad))(*inputs)

    assert_close(gradients("pallas_tpu"), gradients("reference"), max_rel, 5e-6)


def test_sharded_over_batch_and_heads():
    op = "linear"
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inputs = arrays(op, 2, 8, 24, 8, 8)
    row, head = P("data", "tensor"), P("tensor")
    specs = (row, row, row, row, P(), (row,) * len(inputs[5]), head, head)

    def loss(call, inputs):
        out, weights = call(*inputs)
        return sum(jnp.sum(x**2) for x in (out, *weights))

    sharded = jax.shard_map(
        functools.partial(run, op, "pallas_tpu", checkpoint_every=2),
        mesh=mesh,
        in_specs=specs,
        out_specs=(row, (row,) * len(inputs[5])),
    )
    with tpu_interpreter():
        got = jax.jit(jax.value_and_grad(functools.partial(loss, sharded)))(inputs)
    whole = functools.partial(run, op, "reference")
    want = jax.jit(jax.value_and_grad(functools.partial(loss, whole)))(inputs)
    assert_close(got, want, max_rel, 5e-6)


@pytest.mark.parametrize("op", OPS)
def test_decode_step(op):
    """Seven tokens of two sequences at different places of their mini-batches of four; the second
    sequence skips one."""
    function, State = OPS[op]
    q, k, v, lr, pos_scale, weights, *norm = arrays(op, 2, 3, 7, 64, 4)
    sums = tuple(0.01 * x for x in arrays(op, 2, 3, 7, 64, 4, seed=1)[5])
    valid = jnp.ones((2, 7), bool).at[1, 3].set(False)

    def decode(implementation):
        @jax.jit
        def step(carry, inputs):
            state, phase = carry
            q, k, v, lr, valid = inputs
            out, state = function(
                *(x[:, :, None] for x in (q, k, v, lr)),
                *(pos_scale, state, *norm),
                phase=phase,
                valid=valid[:, None],
                implementation=implementation,
            )
            return (state, (phase + valid) % 4), out

        carry, outputs = (State(*weights, *sums), jnp.array([0, 2], jnp.int32)), []
        for i in range(7):
            carry, out = step(carry, (*(x[:, :, i] for x in (q, k, v, lr)), valid[:, i]))
            outputs.append(out)
        return outputs, carry

    assert_close(decode("pallas_tpu"), decode("reference"), max_rel, 5e-6)


@pytest.mark.parametrize("module", [linear_tpu, mlp_tpu])
def test_says_what_it_cannot_run(module):
    for dtype in ("float32", "bfloat16"):
        for K, b in ((64, 16), (64, 64), (96, 16), (96, 64), (20, 5)):
            assert module.unsupported(K, b, 4 * K, jnp.dtype(dtype)) is None
    assert "float16" in module.unsupported(64, 16, 256, jnp.dtype("float16"))
    assert "VMEM" in module.unsupported(512, 512, 2048, jnp.dtype("float32"))
