# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Rotary position embedding in its two layouts, computed in float32.

A pair of channels (a, c) at position p with frequency f turns into (a cos pf - c sin pf, a sin pf +
c cos pf). `half` pairs channel i with i + K/2 (LLaMA as Hugging Face stores it); `interleaved`
pairs 2i with 2i + 1 (the original LLaMA and the TTT codes). The two differ by a permutation of the
channels of q and k.
"""

from typing import Literal

import jax
import jax.numpy as jnp

RotaryLayout = Literal["half", "interleaved"]


def rotary_table(
    positions: jax.Array, head_dim: int, theta: float = 10000.0
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angles. positions (...) int -> two float32 arrays (..., head_dim / 2)."""
    if head_dim % 2:
        raise ValueError(f"rotary embedding pairs channels: head_dim={head_dim} must be even")
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: RotaryLayout) -> jax.Array:
    """Rotates x (..., K); cos and sin broadcast against (..., K / 2). Result in the dtype of x."""
    x32 = x.astype(jnp.float32)
    if layout == "half":
        first, second = jnp.split(x32, 2, axis=-1)
    else:
        first, second = x32[..., 0::2], x32[..., 1::2]
    turned = first * cos - second * sin, first * sin + second * cos
    if layout == "half":
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
