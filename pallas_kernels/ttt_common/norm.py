# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner layer norm, without its scale and bias, and its derivative. Statistics over the last
axis."""

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
