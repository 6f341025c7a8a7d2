# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Norms over the last axis, statistics in float32, result in the dtype of the input.

RMSNorm    y = x / sqrt(mean(x^2) + eps) * scale
LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias        (biased variance)

Both have a derivative of their own, which keeps x alone and sums products as einsums: from JAX's
derivative of the lines above, a CPU makes reductions that take as long as a weight product.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmodels.slots import NormConfig, constant
from pallas_kernels.varying import match_varying


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
        return _rms_norm(self.config.eps, *match_varying((x, self.scale[...])))


class LayerNormLayer(nnx.Module):
    """x (..., D) -> (..., D) in the dtype of x."""

    def __init__(self, config: LayerNorm, width: int, *, param_dtype: str = "float32"):
        self.config = config
        self.scale = constant(1.0, (width,), (None,), param_dtype)
        self.bias = constant(0.0, (width,), (None,), param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays = x, self.scale[...], self.bias[...]
        return _layer_norm(self.config.eps, *match_varying(arrays))


def _mean_product(x, y):
    """mean(x * y) over the last axis, which stays."""
    return _sum("...d,...d->...", x, y)[..., None] / x.shape[-1]


def _sum(spec, *args):
    return jnp.einsum(spec, *args, precision="highest")


def _float32(*arrays):
    return (x.astype(jnp.float32) for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps, x, scale):
    x32, scale = _float32(x, scale)
    return (x32 * _inverse(x32, eps) * scale).astype(x.dtype)


def _inverse(x, eps):
    return jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def _rms_norm_backward(eps, saved, d_y):
    x, scale = saved
    x32, scale32, d_y = _float32(x, scale, d_y)
    inverse = _inverse(x32, eps)
    x_hat = x32 * inverse
    d_hat = d_y * scale32
    dx = inverse * (d_hat - x_hat * _mean_product(d_hat, x_hat))
    return dx.astype(x.dtype), _sum("...d,...d->d", d_y, x_hat).astype(scale.dtype)


_rms_norm.defvjp(lambda eps, x, scale: (_rms_norm(eps, x, scale), (x, scale)), _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(eps, x, scale, bias):
    x32, scale, bias = _float32(x, scale, bias)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    return (centred * _inverse(centred, eps) * scale + bias).astype(x.dtype)


def _layer_norm_backward(eps, saved, d_y):
    x, scale, bias = saved
    x32, scale32, d_y = _float32(x, scale, d_y)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    inverse = _inverse(centred, eps)
    x_hat = centred * inverse
    d_hat = d_y * scale32
    dx = d_hat - jnp.mean(d_hat, -1, keepdims=True) - x_hat * _mean_product(d_hat, x_hat)
    d_bias = jnp.sum(d_y, range(d_y.ndim - 1)).astype(bias.dtype)
    d_scale = _sum("...d,...d->d", d_y, x_hat).astype(scale.dtype)
    return (inverse * dx).astype(x.dtype), d_scale, d_bias


_layer_norm.defvjp(
    lambda eps, x, scale, bias: (_layer_norm(eps, x, scale, bias), (x, scale, bias)),
    _layer_norm_backward,
)
