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

from pallas_kernels import ttt_linear as linear
from pallas_kernels import ttt_mlp as mlp
from pallas_kernels.ttt_common import triton_gpu
from pallas_kernels.ttt_common.reference import token_by_token

pytest.importorskip("triton", reason="triton is not installed: no interpreter for its kernels")

B, H = 2, 2
STATES = {"ttt_linear": linear.TTTLinearState, "ttt_mlp": mlp.TTTMLPState}


@pytest.fixture(scope="module")
def interpreter():
    with triton_interpreter.start() as pool:
        yield pool


@pytest.fixture(autouse=True)
def launched(interpreter, monkeypatch):
    """Every launch goes to the interpreter; the list of those that happened."""
    kernels = []

    def launch(kernel, arrays, scalars, shapes, programs, warps, stages, aliases, constants):
        kernels.append(kernel)
        results = [(x.shape, np.dtype(x.dtype)) for x in shapes]

        def run(*arrays):
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


def inputs(op, K, b, n, dtype, F=None, seed=0):
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


@functools.partial(jax.jit, static_argnums=0)
def expected(op, arrays, d_out, d_weights):
    """The outputs, last weights and cotangents of the reference, all float32."""

    def run(q, k, v, lr, pos, weights, gamma, beta):
        phase, valid = jnp.zeros(q.shape[:1], jnp.int32), jnp.ones(q.shape[::2][:2], bool)
        state = STATES[op](*weights, *(jnp.zeros_like(x) for x in weights))
        out, state = token_by_token(
            module(op, "reference").one_token, q, k, v, lr, pos, state, gamma, beta,
            phase=phase, valid=valid, reset=None, eps=1e-6,
        )  # fmt: skip
        return out, tuple(state[: len(weights)])

    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    result, vjp = jax.vjp(run, *arrays)
    return result, vjp((d_out.astype(jnp.float32), d_weights))


def starts_of(op, arrays, every):
    """The weights at the start of each group, by the reference."""
    q, k, v, lr, pos, weights, gamma, beta = arrays
    b, found = pos.size, []
    for first in range(0, q.shape[2] // b, every):
        cut = [x[:, :, : first * b] for x in (q, k, v, lr)]
        d_out, d_weights = jnp.zeros_like(cut[0]), jax.tree.map(jnp.zeros_like, weights)
        last = weights
        if first:
            last = expected(op, (*cut, pos, weights, gamma, beta), d_out, d_weights)[0][1]
        found.append(last)
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


def assert_close(got, want, tolerance):
    """Each array within tolerance times the largest number in it, and nothing missing."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for x, y in zip(got, want):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


CASES = [
    ("ttt_linear", 64, 16, 5, 2, None, "float32"),
    ("ttt_linear", 64, 16, 3, 8, None, "bfloat16"),
    ("ttt_linear", 96, 16, 3, 1, None, "float32"),
    ("ttt_linear", 96, 64, 2, 2, None, "bfloat16"),
    ("ttt_linear", 64, 64, 3, 2, None, "float32"),
    ("ttt_linear", 24, 5, 4, 3, None, "float32"),
    ("ttt_mlp", 64, 16, 3, 2, 256, "float32"),
    ("ttt_mlp", 64, 16, 2, 8, 256, "bfloat16"),
    ("ttt_mlp", 96, 64, 2, 1, 384, "bfloat16"),
    ("ttt_mlp", 24, 5, 4, 3, 80, "float32"),
]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize(("op", "K", "b", "n", "every", "F", "dtype"), CASES)
def test_equals_the_reference(op, K, b, n, every, F, dtype, launched):
    arrays, d_out, d_weights = inputs(op, K, b, n, jnp.dtype(dtype), F)
    (out, last), grads = expected(op, arrays, d_out, d_weights)
    kernels = module(op, "triton_gpu")
    got_out, got_last, starts = kernels.forward(*arrays, eps=1e-6, every=every)
    assert got_out.dtype == dtype
    assert_close((got_out, got_last), (out, last), TOLERANCE[dtype])
    assert_close(starts, starts_of(op, arrays, every), TOLERANCE[dtype])

    q, k, v, lr, pos, _, gamma, beta = arrays
    saved = (q, k, v, lr, pos, starts, gamma, beta)
    got = kernels.backward(*saved, d_out, d_weights, eps=1e-6, every=every)
    assert [x.dtype for x in got[:3]] == [dtype] * 3
    assert_close(got, grads, TOLERANCE[dtype])
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("op", "K", "F"),
    [("ttt_linear", 64, None), ("ttt_linear", 24, None), ("ttt_mlp", 64, 256), ("ttt_mlp", 96, 80)],
)
def test_one_token_equals_the_reference(op, K, F, launched):
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
