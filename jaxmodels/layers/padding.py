# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Rows with tokens that do not count, wherever they stand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Compact(NamedTuple):
    """How the valid tokens of each row move to its front, and back."""

    order: jax.Array
    """(B, T) int32: the valid tokens in their order, then the others."""
    place: jax.Array
    """(B, T) int32: where each token went; the inverse of `order`."""
    valid: jax.Array
    """(B,) int32: how many there are."""

    def front(self, x: jax.Array) -> jax.Array:
        """x (B, T, ...) with the valid tokens first and zeros after them."""
        x = jnp.take_along_axis(x, _like(self.order, x), 1)
        inside = jnp.arange(x.shape[1]) < self.valid[:, None]
        return jnp.where(_like(inside, x), x, jnp.zeros((), x.dtype))

    def back(self, x: jax.Array) -> jax.Array:
        """Undoes `front`; what stands at tokens that do not count means nothing."""
        return jnp.take_along_axis(x, _like(self.place, x), 1)


def compact(valid: jax.Array) -> Compact:
    """valid (B, T) bool -> the moves."""
    order = jnp.argsort(~valid, axis=1, stable=True)
    place = jnp.argsort(order, axis=1)
    return Compact(order, place, jnp.sum(valid, 1, dtype=jnp.int32))


def _like(index, x):
    return index.reshape(*index.shape, *(1,) * (x.ndim - 2))
