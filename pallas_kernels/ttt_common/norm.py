# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner layer norm, without its scale and bias, and its derivatives. Statistics over the last
axis."""

import jax
import jax.numpy as jnp


def normalise(z, eps):
    """(z - mean) / sigma and sigma; biased variance, eps inside the root."""
    centred = z - jnp.mean(z, -1, keepdims=True)
    sigma = jnp.sqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    return centred / sigma, sigma


def normalise_input_gradient(g, x_hat, sigma):
    """Cotangent of z, given the cotangent g of x_hat = normalise(z)."""
    mean = jnp.mean(g, -1, keepdims=True)
    return (g - mean - x_hat * jnp.mean(g * x_hat, -1, keepdims=True)) / sigma


# The same with 1 / sigma, which is cheaper, and what only the dual form needs.


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def mean_product(x, y):
    """The mean of x y. Not as `mean(x * y)`: XLA of jax 0.10 is ten times slower with that."""
    total = jnp.einsum("...k,...k->...", x, y, precision="highest")
    return total[..., None] / x.shape[-1]


def whiten(z, eps):
    """Like `normalise`, with 1 / sigma."""
    centred = z - mean(z)
    inverse = jax.lax.rsqrt(mean(centred * centred) + eps)
    return centred * inverse, inverse


def whiten_backward(g, x_hat, inverse):
    """Like `normalise_input_gradient`, given 1 / sigma."""
    return (g - mean(g) - x_hat * mean_product(g, x_hat)) * inverse


def target_gradient(z, k, v, gamma, beta, eps):
    """G, the gradient of 1/2 |k + gamma LN(z) + beta - v|^2 with respect to z.

    Returns G, and LN(z) and 1 / sigma for `target_gradient_backward`.
    """
    x_hat, inverse = whiten(z, eps)
    h = gamma * (gamma * x_hat + beta - v + k)
    return whiten_backward(h, x_hat, inverse), x_hat, inverse


def target_gradient_backward(dg, g, x_hat, inverse, k, v, gamma, beta):
    """The derivative of G, which is itself a derivative through the norm.

    Returns the cotangents of z and k (that of v is minus that of k), and those of gamma and beta
    per token.
    """
    r = gamma * x_hat + beta - v + k
    h = gamma * r
    slope = mean_product(dg, x_hat)
    dh = (dg - mean(dg) - x_hat * slope) * inverse
    dr = gamma * dh
    dx = gamma * dr - inverse * (dg * mean_product(h, x_hat) + h * slope)
    dz = whiten_backward(dx, x_hat, inverse) - x_hat * inverse * mean_product(dg, g)
    return dz, dr, dh * r + dr * x_hat, dr
