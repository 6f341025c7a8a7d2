# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Packed rows: every document starts a mini-batch of its own, so that the inner loop can start
again there.

Letters: B rows, T tokens, b inner mini-batch, n mini-batches of a row, N = n b slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Layout(NamedTuple):
    """Where the tokens of packed rows stand on the grid of mini-batches."""

    position: jax.Array
    """(B, T) int32: place of each token in its document."""
    slot: jax.Array
    """(B, T) int32: slot of each token; N or more for padding and for what does not fit."""
    token: jax.Array
    """(B, N) int32: token in each slot; 0 in an empty slot."""
    filled: jax.Array
    """(B, N) bool."""
    reset: jax.Array
    """(B, n) bool: mini-batches that begin a document."""

    def spread(self, x: jax.Array) -> jax.Array:
        """x (B, H, T, ...) -> (B, H, N, ...), zeros in empty slots."""
        index = lambda i: i.reshape(i.shape[0], 1, -1, *(1,) * (x.ndim - 3))
        return jnp.where(index(self.filled), jnp.take_along_axis(x, index(self.token), 2), 0)

    def collect(self, x: jax.Array) -> jax.Array:
        """x (B, H, N, K) -> (B, H, T, K). NaN for a token that did not fit: a forgotten document
        must not pass for a short memory. Padding reads 0."""
        N = x.shape[2]
        out = jnp.take_along_axis(x, jnp.minimum(self.slot, N - 1)[:, None, :, None], 2)
        out = jnp.where((self.slot < N)[:, None, :, None], out, jnp.nan)
        return jnp.where((self.position >= 0)[:, None, :, None], out, 0)


def lay_documents(segment_ids: jax.Array, mini_batch_size: int, max_documents: int) -> Layout:
    """The layout of packed rows.

    Args:
      segment_ids: (B, T) int, one run of equal ids per document, 0 for padding.
      mini_batch_size: b.
      max_documents: runs per row that have room for sure.
    """
    T, b = segment_ids.shape[1], mini_batch_size
    n = (T + max_documents * (b - 1)) // b
    steps = jnp.arange(T, dtype=jnp.int32)
    real = segment_ids != 0
    starts = real & (segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :T])
    begin = jax.lax.cummax(jnp.where(starts, steps, 0), axis=1)
    position = jnp.where(real, steps - begin, -1)
    opens = real & (position % b == 0)  # each document's tokens 0, b, 2 b, ... open a mini-batch
    slot = (jnp.cumsum(opens, 1, dtype=jnp.int32) - 1) * b + position % b
    slot = jnp.where(real, slot, n * b)
    rows = jnp.arange(segment_ids.shape[0])[:, None]
    token = jnp.zeros((len(rows), n * b), jnp.int32).at[rows, slot].set(steps, mode="drop")
    filled = jnp.zeros((len(rows), n * b), bool).at[rows, slot].set(True, mode="drop")
    first = jnp.where(starts, slot // b, n)
    reset = jnp.zeros((len(rows), n), bool).at[rows, first].set(True, mode="drop")
    return Layout(position, slot, token, filled, reset)
