# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""GELU in its tanh approximation with its derivatives, which share the tanh."""

import math

import jax.numpy as jnp

_C = math.sqrt(2 / math.pi)
_A = 0.044715


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(_C * x * (1 + _A * x * x)))


def gelu_and_slope(x):
    """gelu(x) and gelu'(x)."""
    square = x * x
    tanh = jnp.tanh(_C * x * (1 + _A * square))
    half = 0.5 * (1 + tanh)
    return x * half, half + 0.5 * x * (1 - tanh * tanh) * (_C + 3 * _A * _C * square)


def gelu_slope_and_bend(x):
    """gelu(x), gelu'(x) and gelu''(x)."""
    square = x * x
    tanh = jnp.tanh(_C * x * (1 + _A * square))
    half = 0.5 * (1 + tanh)
    inner = _C + 3 * _A * _C * square  # derivative of what is inside the tanh
    sech = 1 - tanh * tanh
    bend = sech * (inner + 3 * _A * _C * square - x * tanh * inner * inner)
    return x * half, half + 0.5 * x * sech * inner, bend
