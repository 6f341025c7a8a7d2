# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Losses: per-token values in float32. The caller weighs them and divides by the global weight."""

import jax
import jax.numpy as jnp

from jaxmodels.sharding import constrain


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-log p(target) and log Z. logits (B, T, V), targets (B, T) int -> two (B, T) float32, in
    nats."""
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return log_z - picked, log_z


def chunked_cross_entropy(
    hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, *, chunk: int = 512
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy(hidden @ unembedding, targets)` with the logits of `chunk` positions at a
    time.

    The backward pass recomputes each chunk's logits, so the (B, T, V) float32 array never exists.

    Args:
      hidden: (B, T, D), the product runs in its dtype and accumulates in float32.
      unembedding: (D, V).
      targets: (B, T) int.
      chunk: positions of the sequence (each for all B rows) whose logits exist together.

    Returns:
      nll (B, T) and log Z (B, T), float32, nats.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    w = unembedding.astype(hidden.dtype)

    @jax.checkpoint
    def piece(hidden, targets):
        logits = jnp.einsum("btd,dv->btv", hidden, w, preferred_element_type=jnp.float32)
        return cross_entropy(constrain(logits, "batch", "sequence", "vocab"), targets)

    T = hidden.shape[1]
    whole = T // chunk * chunk
    if whole <= chunk and whole in (0, T):
        return piece(hidden, targets)

    def pieces(x):
        B = x.shape[0]
        return jnp.moveaxis(x[:, :whole].reshape(B, whole // chunk, chunk, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], whole)

    out = jax.lax.map(lambda xs: piece(*xs), (pieces(hidden), pieces(targets)))
    out = tuple(map(join, out))
    if whole < T:
        rest = piece(hidden[:, whole:], targets[:, whole:])
        out = tuple(jnp.concatenate(pair, 1) for pair in zip(out, rest))
    return out
