# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Device functions that the Triton kernels of both TTT operations share. Imports triton.

Triton's tiles have powers of two as sizes, and products want at least 16: a tile of b tokens and K
features is BP by KP, zero outside. Zero rows (tokens with learning rate 0) and zero columns stay
without effect in every formula, as long as the layer norm leaves the columns out of its statistics.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    ptr, stride, rows, cols, RP: tl.constexpr, CP: tl.constexpr, WHOLE: tl.constexpr = False
):
    """A float32 tile (RP, CP) of which `rows` by `cols` exist; WHOLE says that all of it does."""
    i, j = tl.arange(0, RP)[:, None], tl.arange(0, CP)[None, :]
    if WHOLE:
        x = tl.load(ptr + i * stride + j)
    else:
        x = tl.load(ptr + i * stride + j, mask=(i < rows) & (j < cols), other=0.0)
    return x.to(tl.float32)


@triton.jit
def store_tile(
    ptr, stride, x, rows, cols, RP: tl.constexpr, CP: tl.constexpr, WHOLE: tl.constexpr = False
):
    i, j = tl.arange(0, RP)[:, None], tl.arange(0, CP)[None, :]
    x = x.to(ptr.dtype.element_ty)
    if WHOLE:
        tl.store(ptr + i * stride + j, x)
    else:
        tl.store(ptr + i * stride + j, x, mask=(i < rows) & (j < cols))


@triton.jit
def load_row(ptr, size, P: tl.constexpr):
    i = tl.arange(0, P)
    return tl.load(ptr + i, mask=i < size, other=0.0)


@triton.jit
def store_row(ptr, x, size, P: tl.constexpr):
    i = tl.arange(0, P)
    tl.store(ptr + i, x, mask=i < size)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def add_product(c, a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, acc=c, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def inside(x, K: tl.constexpr, KP: tl.constexpr):
    """Zero in the columns from K on."""
    if K != KP:
        x = tl.where(tl.arange(0, KP)[None, :] < K, x, 0.0)
    return x


@triton.jit
def mean(x, K: tl.constexpr):
    """Of the first K columns; the others are zero."""
    return (tl.sum(x, 1) * (1.0 / K))[:, None]


@triton.jit
def normalise(z, EPS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """LN(z) without scale and bias, and 1 / sigma (rows, 1)."""
    centred = inside(z - mean(z, K), K, KP)
    inverse = 1.0 / tl.sqrt(mean(centred * centred, K) + EPS)
    return centred * inverse, inverse


@triton.jit
def input_gradient(g, x_hat, inverse, K: tl.constexpr, KP: tl.constexpr):
    """Cotangent of z, given the cotangent g of x_hat = normalise(z)."""
    return inside(g - mean(g, K) - x_hat * mean(g * x_hat, K), K, KP) * inverse


@triton.jit
def inner_gradient_backward(dg, g, h, r, x_hat, inverse, gamma, K: tl.constexpr, KP: tl.constexpr):
    """Back through G = J(H; x_hat, sigma), H = gamma R: the derivative of a derivative of LN.

    Returns dz, dr and the part of dgamma per token.
    """
    slope = mean(dg * x_hat, K)
    dh = inside(dg - mean(dg, K) - x_hat * slope, K, KP) * inverse
    dr = gamma * dh
    dx = gamma * dr - inverse * (dg * mean(h * x_hat, K) + h * slope)
    dz = input_gradient(dx, x_hat, inverse, K, KP) - x_hat * inverse * mean(dg * g, K)
    return dz, dr, dh * r + dr * x_hat


@triton.jit
def lower(x, BP: tl.constexpr):
    """Zero above the diagonal."""
    return tl.where(tl.arange(0, BP)[:, None] >= tl.arange(0, BP)[None, :], x, 0.0)
