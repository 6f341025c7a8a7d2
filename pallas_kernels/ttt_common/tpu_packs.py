# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Arithmetic of the TPU kernels on packs: several heads side by side in the lanes.

See `pallas_tpu` for packs and letters. All values are float32 with a leading axis N of packs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pack(NamedTuple):
    """How the arithmetic has to be done: static."""

    heads: int
    """Heads side by side in the lanes."""
    exact: bool
    """Products of float32 at full precision; else their factors are rounded to bfloat16."""
    eps: float


def _own(shape, axis, head, heads):
    """Where an index along `axis` belongs to one of the heads."""
    width = shape[axis] // heads
    index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return (index >= head * width) & (index < (head + 1) * width)


def dot(x, y, x_axis, y_axis, pack):
    """Product of (N, ...) matrices over these axes, counted without N."""
    if not pack.exact:
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    precision = jax.lax.Precision.HIGHEST if pack.exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x,
        y,
        (((x_axis + 1,), (y_axis + 1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def sums(x, pack):
    """Per head and token: the sum over its lanes, (N, b, 1) for each head."""
    if pack.heads == 1:
        return [jnp.sum(x, -1, keepdims=True)]
    own = (_own(x.shape, 2, h, pack.heads) for h in range(pack.heads))
    return [jnp.sum(jnp.where(mask, x, 0), -1, keepdims=True) for mask in own]


def spread(columns, shape):
    """The inverse: one (N, b, 1) per head over the head's lanes."""
    total = jnp.broadcast_to(columns[0], shape)
    for h, column in enumerate(columns[1:], 1):
        total = jnp.where(_own(shape, 2, h, len(columns)), column, total)
    return total


def mean(x, pack):
    """Mean over each head's lanes, at all of them."""
    size = x.shape[-1] // pack.heads
    return spread([total / size for total in sums(x, pack)], x.shape)


def normalise(z, pack):
    """LN without scale and bias, and 1 / sigma."""
    centred = z - mean(z, pack)
    inverse = jax.lax.rsqrt(mean(centred * centred, pack) + pack.eps)
    return centred * inverse, inverse


def normalise_input_gradient(g, x_hat, inverse, pack):
    """Cotangent of z, given the cotangent g of x_hat = LN(z)."""
    return (g - mean(g, pack) - x_hat * mean(g * x_hat, pack)) * inverse


def learn(z, k, v, gamma, beta, pack):
    """From the inner prediction z: LN(z), 1 / sigma, and the inner gradient G with respect to z,
    one row per token."""
    x_hat, inverse = normalise(z, pack)
    h = gamma * (gamma * x_hat + beta - v + k)
    return x_hat, inverse, normalise_input_gradient(h, x_hat, inverse, pack)


def learn_transpose(dg, learned, k, v, gamma, beta, pack):
    """Cotangents of z, of k - v, and of gamma (by token), from that of G = J(H; x_hat, sigma),
    H = gamma R: the derivative of a derivative of LN."""
    x_hat, inverse, g = learned
    r = gamma * x_hat + beta - v + k
    h = gamma * r
    slope = mean(dg * x_hat, pack)
    dh = (dg - mean(dg, pack) - x_hat * slope) * inverse
    dr = gamma * dh
    dx = gamma * dr - inverse * (dg * mean(h * x_hat, pack) + h * slope)
    dz = normalise_input_gradient(dx, x_hat, inverse, pack)
    dz = dz - x_hat * inverse * mean(dg * g, pack)
    return dz, dr, dh * r + dr * x_hat


def stack(x, pack):
    """(N, b, lanes) to (N, S, lanes): rows of head h are zero outside its lanes."""
    if pack.heads == 1:
        return x
    own = (_own(x.shape, 2, h, pack.heads) for h in range(pack.heads))
    return jnp.concatenate([jnp.where(mask, x, 0) for mask in own], 1)


def unstack(x, pack):
    """(N, S, lanes) to (N, b, lanes): from the rows of head h, its lanes."""
    rows = x.shape[1] // pack.heads
    total = x[:, :rows]
    for h in range(1, pack.heads):
        own = _own(total.shape, 2, h, pack.heads)
        total = jnp.where(own, x[:, h * rows : (h + 1) * rows], total)
    return total


def lower(x, pack):
    """(N, b, S): zero where the token of the column comes after that of the row."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 2)
    keep = column <= row
    for h in range(1, pack.heads):
        start = h * x.shape[1]
        keep |= (column >= start) & (column <= start + row)
    return jnp.where(keep, x, 0)


def _diagonal(shape, head):
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 2) == row + head * shape[1]


def as_columns(row, b, pack):
    """(N, 1, S) to one (N, b, 1) per head."""
    shape = (row.shape[0], b, row.shape[2])
    return [
        jnp.sum(jnp.where(_diagonal(shape, h), row, 0), -1, keepdims=True)
        for h in range(pack.heads)
    ]


def rates(lr, b, width, pack):
    """lr (N, 1, S) over the lanes of each token's head, (N, b, width)."""
    return spread(as_columns(lr, b, pack), (lr.shape[0], b, width))


def as_column(row):
    """(N, 1, C) to (N, C, 1)."""
    (column,) = as_columns(row, row.shape[2], Pack(1, True, 0.0))
    return column


def vector_product(row, w):
    """(N, 1, R) times (N, R, C) without the matrix unit, which one row would leave idle."""
    return jnp.sum(as_column(row) * w, 1, keepdims=True)


def as_row(columns):
    """One (N, b, 1) per head to (N, 1, S)."""
    N, b, _ = columns[0].shape
    shape = (N, b, b * len(columns))
    total = jnp.where(_diagonal(shape, 0), columns[0], 0)
    for h, column in enumerate(columns[1:], 1):
        total = jnp.where(_diagonal(shape, h), column, total)
    return jnp.sum(total, 1, keepdims=True)


def d_positions(de, lr, mg):
    """Cotangent of pos, (N, b, 1), from that of E = pos lr and, (N, 1, S), of the last step."""
    row = jax.lax.broadcasted_iota(jnp.int32, de.shape, 1)
    return jnp.sum(lr * (de - jnp.where(row == de.shape[1] - 1, mg, 0)), -1, keepdims=True)


def block_diagonal(w, pack):
    """Zeroes what mixes heads in (N, L, C)."""
    if pack.heads == 1:
        return w
    keep = _own(w.shape, 1, 0, pack.heads) & _own(w.shape, 2, 0, pack.heads)
    for h in range(1, pack.heads):
        keep |= _own(w.shape, 1, h, pack.heads) & _own(w.shape, 2, h, pack.heads)
    return jnp.where(keep, w, 0)


def expand(w, pack):
    """Compact (N, K, C) to block-diagonal (N, L, C); a bias (N, 1, C) stays."""
    if w.shape[1] == 1 or pack.heads == 1:
        return w
    return block_diagonal(jnp.concatenate([w] * pack.heads, 1), pack)


def fold(w, rows):
    """The inverse of `expand`, to `rows` rows."""
    return sum(w[:, i : i + rows] for i in range(0, w.shape[1], rows))
