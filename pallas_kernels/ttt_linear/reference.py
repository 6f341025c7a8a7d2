# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear for one token: slow, obviously right, the truth for every other implementation.

Letters: B batch, H heads, K head width.
"""

import jax.numpy as jnp

from pallas_kernels.ttt_common.norm import normalise, normalise_input_gradient
from pallas_kernels.ttt_common.scan import like
from pallas_kernels.ttt_linear.state import TTTLinearState


def inner_gradient(k, v, w, b, ln_scale, ln_bias, eps):
    """Gradient of 1/2 |k + LN(k w + b) - v|^2 with respect to z = k w + b.  k, v (B, H, K)."""
    x_hat, sigma = normalise(jnp.einsum("bhk,bhkj->bhj", k, w) + b, eps)
    residual = k + ln_scale * x_hat + ln_bias - v
    return normalise_input_gradient(ln_scale * residual, x_hat, sigma)


def one_token(q, k, v, lr, scale, last, state, ln_scale, ln_bias, *, eps):
    """Learns from one token and reads with it.

    q, k, v (B, H, K), lr (B, H); scale (B,) is the factor of the token's place; where last (B,),
    the token ends its mini-batch. A token that is to be skipped has q, k, v, lr and last zero.
    """
    g = lr[..., None] * inner_gradient(k, v, state.w, state.b, ln_scale, ln_bias, eps)
    w_sum = state.w_sum + k[..., :, None] * g[..., None, :]
    b_sum = state.b_sum + g
    w, b = (x - like(scale, x) * y for x, y in ((state.w, w_sum), (state.b, b_sum)))
    read, _ = normalise(jnp.einsum("bhk,bhkj->bhj", q, w) + b, eps)
    out = q + ln_scale * read + ln_bias
    return out, TTTLinearState(
        w=jnp.where(like(last, w), w, state.w),
        b=jnp.where(like(last, b), b, state.b),
        w_sum=jnp.where(like(last, w), 0.0, w_sum),
        b_sum=jnp.where(like(last, b), 0.0, b_sum),
    )
