# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""What TTT-Linear remembers of a sequence: 2 H (K^2 + K) float32 numbers, whatever its length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TTTLinearState(NamedTuple):
    """Fast weights and what the current inner mini-batch has gathered so far, all float32."""

    w: jax.Array
    """(B, H, K, K): the inner weight at the start of the current mini-batch."""
    b: jax.Array
    """(B, H, K): the inner bias there."""
    w_sum: jax.Array
    """(B, H, K, K): sum over the mini-batch's tokens so far of lr_j k_j^T g_j."""
    b_sum: jax.Array
    """(B, H, K): sum of lr_j g_j."""


def init_state(w0: jax.Array, b0: jax.Array, batch_size: int) -> TTTLinearState:
    """The state before the first token: w0 (H, K, K) and b0 (H, K) for every sequence."""
    w = jnp.broadcast_to(w0.astype(jnp.float32), (batch_size, *w0.shape))
    b = jnp.broadcast_to(b0.astype(jnp.float32), (batch_size, *b0.shape))
    return TTTLinearState(w=w, b=b, w_sum=jnp.zeros_like(w), b_sum=jnp.zeros_like(b))
