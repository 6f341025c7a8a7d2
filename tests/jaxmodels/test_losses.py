# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Chunked cross-entropy equals the plain one, gradients included, without the big array."""

import jax
import jax.numpy as jnp
import pytest
from measure import max_abs

from jaxmodels.losses import chunked_cross_entropy, cross_entropy

B, T, D, V = 3, 37, 16, 61


def inputs(dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
    w = jax.random.normal(keys[1], (D, V))
    return (
        hidden,
        w,
        jax.random.randint(keys[2], (B, T), 0, V),
        jax.random.normal(keys[3], (2, B, T)),
    )


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 500])
def test_equals_the_plain_form(chunk):
    hidden, w, targets, cotangent = inputs()

    def score(fn):
        def total(hidden, w):
            nll, log_z = fn(hidden, w)
            return jnp.sum(nll * cotangent[0] + log_z * cotangent[1]), (nll, log_z)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, w)

    got = score(lambda h, w: chunked_cross_entropy(h, w, targets, chunk=chunk))
    want = score(lambda h, w: cross_entropy(h @ w, targets))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert max_abs(a, b) < 1e-5 * (1 + float(jnp.max(jnp.abs(b))))


def test_half_precision_products_are_summed_in_float32():
    hidden, w, targets, _ = inputs("bfloat16")
    nll, _ = chunked_cross_entropy(hidden, w, targets, chunk=8)
    exact = hidden.astype(jnp.float32) @ w.astype(jnp.bfloat16).astype(jnp.float32)
    assert nll.dtype == jnp.float32
    assert max_abs(nll, cross_entropy(exact, targets)[0]) < 1e-4


def test_never_holds_all_logits():
    hidden, w = jnp.zeros((2, 512, 32)), jnp.zeros((32, 4096))
    targets = jnp.zeros((2, 512), jnp.int32)
    loss = lambda h, w: jnp.sum(chunked_cross_entropy(h, w, targets, chunk=32)[0])
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, w).compile()
    full = 2 * 512 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < full / 2
    assert "f32[2,512,4096]" not in compiled.as_text()


def test_chunk_must_be_positive():
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_cross_entropy(*inputs()[:3], chunk=0)
