# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""What TTT-MLP remembers of a sequence: 2 H (2 K F + F + K) float32 numbers, whatever its length
(F = 4 K officially)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TTTMLPState(NamedTuple):
    """Fast weights and what the current inner mini-batch has gathered so far, all float32."""

    w1: jax.Array
    """(B, H, K, F): the inner weight of the first layer at the start of the current mini-batch."""
    b1: jax.Array
    """(B, H, F)."""
    w2: jax.Array
    """(B, H, F, K)."""
    b2: jax.Array
    """(B, H, K)."""
    w1_sum: jax.Array
    """(B, H, K, F): sum over the mini-batch's tokens so far of lr_j k_j^T g1_j."""
    b1_sum: jax.Array
    """(B, H, F): sum of lr_j g1_j."""
    w2_sum: jax.Array
    """(B, H, F, K): sum of lr_j gelu(k_j w1 + b1)^T g2_j."""
    b2_sum: jax.Array
    """(B, H, K): sum of lr_j g2_j."""


def init_state(
    w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array, batch_size: int
) -> TTTMLPState:
    """The state before the first token: w1 (H, K, F), b1 (H, F), w2 (H, F, K), b2 (H, K) for every
    sequence."""
    weights = tuple(
        jnp.broadcast_to(x.astype(jnp.float32), (batch_size, *x.shape)) for x in (w1, b1, w2, b2)
    )
    return TTTMLPState(*weights, *(jnp.zeros_like(x) for x in weights))
