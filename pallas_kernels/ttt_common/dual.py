# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Small pieces of the dual form."""

import jax.numpy as jnp


def t(x):
    return jnp.swapaxes(x, -1, -2)


def lower(x):
    """Zeroes what lies above the diagonal."""
    i = jnp.arange(x.shape[-1])
    return jnp.where(i[:, None] >= i, x, 0.0)


def bias(x):
    """(B, H, N) -> (B, H, 1, N), for all tokens of a mini-batch."""
    return x[:, :, None]


def over_tokens(x):
    """Sum over the tokens of a mini-batch, (B, H, b, N) -> (B, H, N)."""
    return jnp.sum(x, 2)
