# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The Triton kernels of both TTT operations, executed on the CPU by Triton's interpreter."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import ttt_linear as linear
from pallas_kernels import ttt_mlp as mlp
from pallas_kernels.ttt_common import triton_gpu

pytest.importorskip("triton", reason="triton is not installed: no interpreter for its kernels")

STATES = {"ttt_linear": linear.TTTLinearState, "ttt_mlp": mlp.TTTMLPState}


@pytest.fixture(scope="module")
def interpreter():
    with triton_interpreter.start() as pool:
        yield pool


@pytest.fixture(autouse=True)
def launched(interpreter, monkeypatch):
    """Every launch goes to the interpreter; the list of the kernels that ran."""
    kernels = []

    def launch(kernel, arrays, scalars, shapes, programs, warps, stages, aliases, constants):
        results = [(x.shape, np.dtype(x.dtype)) for x in shapes]

        def run(*arrays):
            kernels.append(kernel)
            arrays = [np.asarray(x) for x in arrays]
            job = kernel, arrays, scalars, results, programs, aliases, constants
            return interpreter.submit(triton_interpreter.interpret, *job).result()

        return jax.pure_callback(run, shapes, *arrays)

    monkeypatch.setattr(triton_gpu, "launch", launch)
    return kernels


def module(op, name):
    return importlib.import_module(f"pallas_kernels.{op}.{name}")


def weight_shapes(op, K, F):
    if op == "ttt_linear":
        return [(K, K), (K,)]
    return [(K, F), (F,), (F, K), (K,)]


def inputs(op, B, H, K, b, n, dtype, F=None, seed=0):
    """q, k, v, lr, pos_scale, weights, gamma, beta, and cotangents of out and the last weights."""
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v, d_out = (array(B, H, n * b, K).astype(dtype) for _ in range(4))
    lr = jax.nn.sigmoid(array(B, H, n * b)) / K
    pos = jnp.maximum(1 / jnp.arange(1, b + 1) + 0.1 * array(b), 0)
    shapes = weight_shapes(op, K, F)
    weights = tuple(0.3 * array(B, H, *s) for s in shapes)
    d_weights = tuple(array(B, H, *s) for s in shapes)
    gamma, beta = 1 + 0.2 * array(H, K), 0.2 * array(H, K)
    return (q, k, v, lr, pos, weights, gamma, beta), d_out, d_weights


@functools.partial(jax.jit, static_argnums=(0, 1))
def expected(op, every, arrays, d_out, d_weights):
    """(out, last weights), the weights at the start of each group, and the cotangents: by the
    reference, token by token, in float32."""
    one_token = module(op, "reference").one_token

    def run(q, k, v, lr, pos, weights, gamma, beta):
        B, b = q.shape[0], pos.size

        def token(state, xs):
            i, q, k, v, lr = xs
            scale, last = jnp.full((B,), pos[i % b]), jnp.full((B,), i % b == b - 1)
            out, new = one_token(q, k, v, lr, scale, last, state, gamma, beta, eps=1e-6)
            return new, (out, state[: len(weights)])

        state = STATES[op](*weights, *(jnp.zeros_like(x) for x in weights))
        xs = (jnp.arange(q.shape[2]), *(jnp.moveaxis(x, 2, 0) for x in (q, k, v, lr)))
        state, (out, before) = jax.lax.scan(token, state, xs)
        starts = tuple(x[:: b * every] for x in before)
        return (jnp.moveaxis(out, 0, 2), tuple(state[: len(weights)])), starts

    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    result, vjp, starts = jax.vjp(run, *arrays, has_aux=True)
    return result, starts, vjp((d_out.astype(jnp.float32), d_weights))


def assert_close(got, want, tolerance):
    """Each array within tolerance times the largest number in it, and nothing missing."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for x, y in zip(got, want):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


CASES = [
    # B, H, K, b, mini-batches, every, F, dtype
    ("ttt_linear", 2, 2, 64, 16, 5, 2, None, "float32"),
    ("ttt_linear", 1, 1, 64, 16, 3, 8, None, "bfloat16"),
    ("ttt_linear", 1, 1, 96, 16, 3, 1, None, "float32"),
    ("ttt_linear", 1, 2, 96, 16, 1, 4, None, "bfloat16"),
    ("ttt_linear", 1, 1, 64, 64, 3, 2, None, "float32"),
    ("ttt_linear", 1, 2, 24, 40, 3, 2, None, "float32"),
    ("ttt_linear", 2, 1, 24, 5, 4, 3, None, "float32"),
    ("ttt_mlp", 2, 2, 24, 5, 4, 3, 80, "float32"),
    ("ttt_mlp", 1, 2, 24, 40, 3, 2, 80, "float32"),
    ("ttt_mlp", 1, 1, 64, 16, 3, 2, 256, "float32"),
    ("ttt_mlp", 1, 1, 64, 64, 2, 8, 256, "bfloat16"),
    ("ttt_mlp", 1, 1, 96, 16, 2, 1, 384, "bfloat16"),
]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize(("op", "B", "H", "K", "b", "n", "every", "F", "dtype"), CASES)
def test_equals_the_reference(op, B, H, K, b, n, every, F, dtype, launched):
    arrays, d_out, d_weights = inputs(op, B, H, K, b, n, jnp.dtype(dtype), F)
    results, starts, grads = expected(op, every, arrays, d_out, d_weights)
    kernels = module(op, "triton_gpu")
    *got, got_starts = kernels.forward(*arrays, eps=1e-6, every=every)
    assert got[0].dtype == dtype
    assert_close(got, results, TOLERANCE[dtype])
    assert_close(got_starts, starts, TOLERANCE[dtype])

    q, k, v, lr, pos, _, gamma, beta = arrays
    saved = (q, k, v, lr, pos, got_starts, gamma, beta)
    got = kernels.backward(*saved, d_out, d_weights, eps=1e-6, every=every)
    assert [x.dtype for x in got[:3]] == [dtype] * 3
    assert_close(got, grads, TOLERANCE[dtype])
    assert len(launched) == 2


@pytest.mark.parametrize(("op", "F"), [("ttt_linear", None), ("ttt_mlp", 32)])
def test_mapped_axes_become_programs(op, F, launched):
    """vmap over everything but pos_scale and gamma, twice over for the forward pass."""
    sets = [inputs(op, 1, 2, 16, 4, 3, jnp.float32, F, seed) for seed in range(2)]
    arrays, d_out, d_weights = jax.tree.map(lambda *x: jnp.stack(x), *sets)
    pos, gamma = arrays[4][0], arrays[6][0]
    arrays = (*arrays[:4], pos, arrays[5], gamma, arrays[7])
    axes = (0, 0, 0, 0, None, 0, None, 0)
    kernels = module(op, "triton_gpu")
    forward = functools.partial(kernels.forward, eps=1e-6, every=2)
    backward = functools.partial(kernels.backward, eps=1e-6, every=2)
    out, last, starts = jax.vmap(forward, axes)(*arrays)
    saved = (*arrays[:5], starts, *arrays[6:], d_out, d_weights)
    grads = jax.vmap(backward, (*axes, 0, 0))(*saved)
    assert len(launched) == 2
    for i in range(2):
        pick = functools.partial(jax.tree.map, lambda x, i=i: x[i])
        one = tuple(x if axis is None else pick(x) for x, axis in zip(arrays, axes))
        want, want_starts, want_grads = expected(op, 2, one, d_out[i], pick(d_weights))
        assert_close(pick((out, last, starts, grads)), (*want, want_starts, want_grads), 2e-5)
    pair = functools.partial(jax.tree.map, lambda x: jnp.stack([x, x]))
    again = jax.vmap(jax.vmap(forward, axes))(*pair(arrays))
    assert_close(again, pair((out, last, starts)), 1e-6)


@pytest.mark.parametrize(("op", "F"), [("ttt_linear", None), ("ttt_mlp", 32)])
def test_public_operation_under_jit_scan_checkpoint_and_shard_map(op, F, launched):
    """Its value and gradients, with a partial last mini-batch, on two devices."""
    call = {"ttt_linear": linear.ttt_linear, "ttt_mlp": mlp.ttt_mlp}[op]
    arrays, *_ = inputs(op, 2, 2, 16, 4, 3, jnp.float32, F)
    arrays = (*(x[:, :, :10] for x in arrays[:4]), *arrays[4:])
    per_head, whole = PartitionSpec("data"), PartitionSpec()
    specs = (per_head,) * 4 + (whole, per_head, whole, whole)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def loss(implementation, *arrays):
        def layer(x, _):
            q, k, v, lr, pos, weights, gamma, beta = arrays
            state = STATES[op](*weights, *(jnp.zeros_like(x) for x in weights))
            out, state = call(
                q + x, k, v, lr, pos, state, gamma, beta, implementation=implementation
            )
            return out, sum(jnp.sum(jnp.sin(x)) for x in state)

        x, sums = jax.lax.scan(jax.checkpoint(layer), jnp.zeros_like(arrays[0]), length=2)
        return jax.lax.psum(jnp.sum(jnp.sin(x)) + jnp.sum(sums), "data")

    def run(implementation):
        sharded = jax.shard_map(
            functools.partial(loss, implementation), mesh=mesh, in_specs=specs, out_specs=whole
        )
        return jax.jit(jax.value_and_grad(sharded, tuple(range(8))))(*arrays)

    assert_close(run("triton_gpu"), run("reference"), 2e-5)
    assert launched


@pytest.mark.parametrize(
    ("op", "K", "F"),
    [("ttt_linear", 64, None), ("ttt_linear", 24, None), ("ttt_mlp", 64, 256), ("ttt_mlp", 96, 80)],
)
def test_one_token_equals_the_reference(op, K, F, launched):
    B, H = 2, 1
    rng = np.random.default_rng(1)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weights = [0.3 * array(B, H, *s) for s in weight_shapes(op, K, F)]
    state = STATES[op](*weights, *(0.1 * x for x in weights))
    q, k, v = (array(B, H, K) for _ in range(3))
    lr, scale, last = jax.nn.sigmoid(array(B, H)) / K, jnp.array([0.5, 0.2]), jnp.array([0, 1]) > 0
    arrays = q, k, v, lr, scale, last, state, 1 + 0.2 * array(H, K), 0.2 * array(H, K)
    want = module(op, "reference").one_token(*arrays, eps=1e-6)
    got = module(op, "triton_gpu").one_token(*arrays, eps=1e-6)
    assert type(got[1]) is STATES[op]
    assert_close(got, want, 1e-5)
    assert len(launched) == 1
