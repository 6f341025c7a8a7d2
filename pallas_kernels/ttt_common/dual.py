# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Products and small pieces of the dual form. All arrays begin with the axes B and H."""

import jax
import jax.numpy as jnp


def dot(x, y):
    """x y. Written as what XLA runs, like the next two: a transposed operand is often copied."""
    return _product(x, y, -1, -2)


def dot_t(x, y):
    """x y^T."""
    return _product(x, y, -1, -1)


def t_dot(x, y):
    """x^T y."""
    return _product(x, y, -2, -2)


def _product(x, y, i, j):
    contract = (x.ndim + i,), (y.ndim + j,)
    return jax.lax.dot_general(x, y, (contract, ((0, 1), (0, 1))))


def lower(x):
    """Zeroes what lies above the diagonal."""
    i = jnp.arange(x.shape[-1])
    return jnp.where(i[:, None] >= i, x, 0.0)


def rows(x):
    """(B, H, N) -> (B, H, 1, N), for all rows."""
    return x[:, :, None]


def columns(x):
    """(B, H, N) -> (B, H, N, 1), for all columns."""
    return x[..., None]


def after(x, done):
    """x, but not before `done` (B, H, ., .) is there; NaN where that begins with NaN.

    Weights that are replaced while a product may still read them are copied first, in every
    mini-batch. What the new ones are made of waits for the last product instead.
    """
    sign = done[..., 0, 0].reshape(*x.shape[:2], *(1,) * (x.ndim - 2))
    return jnp.where(sign == sign, x, sign)  # XLA does not drop this comparison


def row_dot(x, y):
    """Sums over the last axis of x y."""
    return jnp.einsum("bhik,bhik->bhi", x, y, precision="highest")


def weigh(x, by):
    """Sums over the last axis of x (B, H, N, b), weighted by (B, H, b)."""
    return jnp.einsum("bhnj,bhj->bhn", x, by, precision="highest")


def back_rates(de, mg, lr, pos_scale):
    """Cotangents of lr (B, H, b) and pos_scale, per sequence and head, (B, H, b).

    de is that of E[i, j] = pos_scale_i lr_j, and -mg of pos_scale[-1] lr, the rates of the step.
    """
    highest = dict(precision="highest")
    dlr = jnp.einsum("bhij,i->bhj", de, pos_scale, **highest) - pos_scale[-1] * mg
    d_pos = jnp.einsum("bhij,bhj->bhi", de, lr, **highest)
    return dlr, d_pos.at[..., -1].add(-jnp.einsum("bhj,bhj->bh", mg, lr, **highest))
