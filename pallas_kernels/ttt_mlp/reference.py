# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-MLP token by token: slow, obviously right, the truth for every other implementation.

Letters: B batch, H heads, T tokens, K head width, F inner hidden width, b inner mini-batch.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_common.norm import normalise, normalise_input_gradient
from pallas_kernels.ttt_mlp.state import TTTMLPState


def gelu(x):
    """GELU in its tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


def inner_gradients(k, v, state, ln_scale, ln_bias, eps):
    """Gradients of 1/2 |f(k) - v|^2, f(k) = k + LN(gelu(k w1 + b1) w2 + b2), with respect to the
    results of the two layers before their non-linearities, and the hidden values.

    k, v (B, H, K) -> g1 (B, H, F), g2 (B, H, K), hidden (B, H, F).
    """
    hidden, gelu_vjp = jax.vjp(gelu, jnp.einsum("bhk,bhkf->bhf", k, state.w1) + state.b1)
    x_hat, sigma = normalise(jnp.einsum("bhf,bhfk->bhk", hidden, state.w2) + state.b2, eps)
    residual = k + ln_scale * x_hat + ln_bias - v
    g2 = normalise_input_gradient(ln_scale * residual, x_hat, sigma)
    (g1,) = gelu_vjp(jnp.einsum("bhk,bhfk->bhf", g2, state.w2))
    return g1, g2, hidden


def ttt_mlp_reference(
    q, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, phase, valid, eps, checkpoint_every
):
    """See `api.ttt_mlp`. `checkpoint_every` is not needed here."""
    del checkpoint_every
    B, _, T, _ = q.shape
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    size = pos_scale.shape[0]
    phase = jnp.zeros((B,), jnp.int32) if phase is None else phase
    valid = jnp.ones((B, T), bool) if valid is None else valid

    def token(carry, inputs):
        state, phase = carry
        q, k, v, lr, valid = inputs
        # The query too: its output means nothing, but its NaN times 0 would reach gradients.
        q, k, v, lr = (
            jnp.where(valid.reshape(B, *(1,) * (x.ndim - 1)), x, 0) for x in (q, k, v, lr)
        )
        g1, g2, hidden = inner_gradients(k, v, state, ln_scale, ln_bias, eps)
        g1, g2 = lr[..., None] * g1, lr[..., None] * g2
        start = state[:4]
        sums = (
            state.w1_sum + k[..., :, None] * g1[..., None, :],
            state.b1_sum + g1,
            state.w2_sum + hidden[..., :, None] * g2[..., None, :],
            state.b2_sum + g2,
        )
        scale = pos_scale[phase]
        w1, b1, w2, b2 = (x - _like(scale, x) * total for x, total in zip(start, sums))
        read = gelu(jnp.einsum("bhk,bhkf->bhf", q, w1) + b1)
        read, _ = normalise(jnp.einsum("bhf,bhfk->bhk", read, w2) + b2, eps)
        out = q + ln_scale * read + ln_bias
        last = (phase == size - 1) & valid
        start = (jnp.where(_like(last, x), y, x) for x, y in zip(start, (w1, b1, w2, b2)))
        sums = (jnp.where(_like(last, x), 0.0, x) for x in sums)
        return (TTTMLPState(*start, *sums), (phase + valid) % size), out

    by_token = [jnp.moveaxis(x, 2, 0) for x in (q, k, v, lr)] + [valid.T]
    (state, _), out = jax.lax.scan(token, (state, phase), tuple(by_token))
    return jnp.moveaxis(out, 0, 2), state


def _like(per_row, x):
    """(B,) with axes of size 1, so that it broadcasts against x (B, ...)."""
    return per_row.reshape(-1, *(1,) * (x.ndim - 1))
