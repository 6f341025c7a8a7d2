# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""A sequence token by token: slow, obviously right. JAX differentiates it."""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_common.scan import like


def token_by_token(
    one_token, q, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, phase, valid, reset, eps
):
    """Calls `one_token` (the reference's own) for every token. phase (B,), valid (B, T); reset
    (B, ceil(T / b)) or None counts mini-batches from token 0."""
    first, size = state, pos_scale.shape[0]

    def token(carry, inputs):
        state, phase = carry
        i, q, k, v, lr, valid = inputs
        # The query too: its output means nothing, but its NaN times 0 would reach gradients.
        q, k, v, lr = (jnp.where(like(valid, x), x, 0) for x in (q, k, v, lr))
        if reset is not None:
            now = (i % size == 0) & reset[:, i // size]
            state = jax.tree.map(lambda x, y: jnp.where(like(now, x), x, y), first, state)
        last = (phase == size - 1) & valid
        out, state = one_token(
            q, k, v, lr, pos_scale[phase], last, state, ln_scale, ln_bias, eps=eps
        )
        return (state, (phase + valid) % size), jnp.where(like(valid, out), out, 0)

    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    by_token = [jnp.moveaxis(x, 2, 0) for x in (q, k, v, lr)] + [valid.T]
    steps = jnp.arange(q.shape[2])
    (state, _), out = jax.lax.scan(token, (state, phase), (steps, *by_token))
    return jnp.moveaxis(out, 0, 2), state
