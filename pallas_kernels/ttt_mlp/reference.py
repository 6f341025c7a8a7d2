# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-MLP for one token: slow, obviously right, the truth for every other implementation.

Letters: B batch, H heads, K head width, F inner hidden width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_common.norm import normalise, normalise_input_gradient
from pallas_kernels.ttt_common.scan import like
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


def one_token(q, k, v, lr, scale, last, state, ln_scale, ln_bias, *, eps):
    """Learns from one token and reads with it.

    q, k, v (B, H, K), lr (B, H); scale (B,) is the factor of the token's place; where last (B,),
    the token ends its mini-batch. A token that is to be skipped has q, k, v, lr and last zero.
    """
    g1, g2, hidden = inner_gradients(k, v, state, ln_scale, ln_bias, eps)
    g1, g2 = lr[..., None] * g1, lr[..., None] * g2
    start = state[:4]
    sums = (
        state.w1_sum + k[..., :, None] * g1[..., None, :],
        state.b1_sum + g1,
        state.w2_sum + hidden[..., :, None] * g2[..., None, :],
        state.b2_sum + g2,
    )
    w1, b1, w2, b2 = now = tuple(x - like(scale, x) * total for x, total in zip(start, sums))
    read = gelu(jnp.einsum("bhk,bhkf->bhf", q, w1) + b1)
    read, _ = normalise(jnp.einsum("bhf,bhfk->bhk", read, w2) + b2, eps)
    out = q + ln_scale * read + ln_bias
    start = (jnp.where(like(last, x), y, x) for x, y in zip(start, now))
    sums = (jnp.where(like(last, x), 0.0, x) for x in sums)
    return out, TTTMLPState(*start, *sums)
