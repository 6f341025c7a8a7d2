# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear token by token: slow, obviously right, the truth for every other implementation.

Letters: B batch, H heads, T tokens, K head width, b inner mini-batch.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_common.norm import normalise, normalise_input_gradient
from pallas_kernels.ttt_linear.state import TTTLinearState


def inner_gradient(k, v, w, b, ln_scale, ln_bias, eps):
    """Gradient of 1/2 |k + LN(k w + b) - v|^2 with respect to z = k w + b.  k, v (B, H, K)."""
    x_hat, sigma = normalise(jnp.einsum("bhk,bhkj->bhj", k, w) + b, eps)
    residual = k + ln_scale * x_hat + ln_bias - v
    return normalise_input_gradient(ln_scale * residual, x_hat, sigma)


def ttt_linear_reference(
    q, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, phase, valid, eps, checkpoint_every
):
    """See `api.ttt_linear`. `checkpoint_every` is not needed here."""
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
        g = lr[..., None] * inner_gradient(k, v, state.w, state.b, ln_scale, ln_bias, eps)
        w_sum = state.w_sum + k[..., :, None] * g[..., None, :]
        b_sum = state.b_sum + g
        scale = pos_scale[phase][:, None, None]
        w, b = state.w - scale[..., None] * w_sum, state.b - scale * b_sum
        read, _ = normalise(jnp.einsum("bhk,bhkj->bhj", q, w) + b, eps)
        out = q + ln_scale * read + ln_bias
        last = ((phase == size - 1) & valid)[:, None, None]
        state = TTTLinearState(
            w=jnp.where(last[..., None], w, state.w),
            b=jnp.where(last, b, state.b),
            w_sum=jnp.where(last[..., None], 0.0, w_sum),
            b_sum=jnp.where(last, 0.0, b_sum),
        )
        return (state, (phase + valid) % size), out

    by_token = [jnp.moveaxis(x, 2, 0) for x in (q, k, v, lr)] + [valid.T]
    (state, _), out = jax.lax.scan(token, (state, phase), tuple(by_token))
    return jnp.moveaxis(out, 0, 2), state
