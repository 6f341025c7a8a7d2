# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Norms over the last axis, statistics in float32, result in the dtype of the input.

RMSNorm    y = x / sqrt(mean(x^2) + eps) * scale
LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias        (biased variance)
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmodels.slots import NormConfig, constant


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm(NormConfig):
    """RMS norm with a learned scale and no bias."""

    eps: float = 1e-6
    """Added to the mean square, inside the root."""

    def build(self, width: int, *, param_dtype: str = "float32") -> "RMSNormLayer":
        return RMSNormLayer(self, width, param_dtype=param_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNorm(NormConfig):
    """Layer norm with a learned scale and bias."""

    eps: float = 1e-6
    """Added to the variance, inside the root."""

    def build(self, width: int, *, param_dtype: str = "float32") -> "LayerNormLayer":
        return LayerNormLayer(self, width, param_dtype=param_dtype)


class RMSNormLayer(nnx.Module):
    """x (..., D) -> (..., D) in the dtype of x."""

    def __init__(self, config: RMSNorm, width: int, *, param_dtype: str = "float32"):
        self.config = config
        self.scale = constant(1.0, (width,), (None,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.config.eps)
        return (x32 * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNormLayer(nnx.Module):
    """x (..., D) -> (..., D) in the dtype of x."""

    def __init__(self, config: LayerNorm, width: int, *, param_dtype: str = "float32"):
        self.config = config
        self.scale = constant(1.0, (width,), (None,), param_dtype)
        self.bias = constant(0.0, (width,), (None,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, -1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + self.config.eps)
        y = centred * inverse * self.scale[...].astype(jnp.float32)
        return (y + self.bias[...].astype(jnp.float32)).astype(x.dtype)
