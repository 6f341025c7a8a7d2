# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Channel mixers: what each position does by itself. Letters: F hidden width.

SwiGLU   y = W_down( silu(x W_gate) * (x W_up) )         no biases
GELU     y = gelu(x W_up + b_up) W_down + b_down         biases optional
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmodels.sharding import any_mesh, constrain
from jaxmodels.slots import ChannelConfig, Taps, constant, weight


def _check_width(d_ff: int) -> None:
    if d_ff < 1:
        raise ValueError(f"d_ff={d_ff} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(ChannelConfig):
    """Gated MLP of LLaMA."""

    taps: ClassVar[tuple[str, ...]] = ("channel_hidden",)
    d_ff: int
    """Hidden width."""

    def __post_init__(self):
        _check_width(self.d_ff)

    def build(self, d_model, *, dtype="float32", param_dtype="float32", rngs):
        return SwiGLULayer(self, d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def flops_per_token(self, d_model):
        return 6 * d_model * self.d_ff


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeluMLP(ChannelConfig):
    """Two-matrix MLP with GELU."""

    taps: ClassVar[tuple[str, ...]] = ("channel_hidden",)
    d_ff: int
    """Hidden width."""
    approximation: Literal["erf", "tanh"] = "erf"
    """The exact GELU or its tanh approximation."""
    bias: bool = True
    """Learned biases on both products."""

    def __post_init__(self):
        _check_width(self.d_ff)

    def build(self, d_model, *, dtype="float32", param_dtype="float32", rngs):
        return GeluMLPLayer(self, d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def flops_per_token(self, d_model):
        return 4 * d_model * self.d_ff


class SwiGLULayer(nnx.Module):
    """x (B, T, D) -> (B, T, D) in `dtype`."""

    def __init__(self, config: SwiGLU, d_model, *, dtype="float32", param_dtype="float32", rngs):
        self.config, self.dtype = config, dtype
        self.w_gate = weight(rngs, (d_model, config.d_ff), ("embed", "mlp"), param_dtype)
        self.w_up = weight(rngs, (d_model, config.d_ff), ("embed", "mlp"), param_dtype)
        self.w_down = weight(rngs, (config.d_ff, d_model), ("mlp", "embed"), param_dtype)

    @any_mesh(P)
    def __call__(self, x: jax.Array, *, tap: Taps | None = None) -> jax.Array:
        tap = tap or Taps()
        dtype = jnp.dtype(self.dtype)
        x = x.astype(dtype)
        gate = jnp.einsum("btd,df->btf", x, self.w_gate[...].astype(dtype))
        up = jnp.einsum("btd,df->btf", x, self.w_up[...].astype(dtype))
        hidden = constrain(jax.nn.silu(gate) * up, "batch", "sequence", "mlp")
        hidden = tap("channel_hidden", hidden)
        return jnp.einsum("btf,fd->btd", hidden, self.w_down[...].astype(dtype))


class GeluMLPLayer(nnx.Module):
    """x (B, T, D) -> (B, T, D) in `dtype`."""

    def __init__(self, config: GeluMLP, d_model, *, dtype="float32", param_dtype="float32", rngs):
        self.config, self.dtype = config, dtype
        self.w_up = weight(rngs, (d_model, config.d_ff), ("embed", "mlp"), param_dtype)
        self.w_down = weight(rngs, (config.d_ff, d_model), ("mlp", "embed"), param_dtype)
        bias = lambda width, axis: constant(0.0, (width,), (axis,), param_dtype)
        self.b_up = bias(config.d_ff, "mlp") if config.bias else None
        self.b_down = bias(d_model, None) if config.bias else None

    @any_mesh(P)
    def __call__(self, x: jax.Array, *, tap: Taps | None = None) -> jax.Array:
        tap = tap or Taps()
        dtype = jnp.dtype(self.dtype)
        hidden = jnp.einsum("btd,df->btf", x.astype(dtype), self.w_up[...].astype(dtype))
        if self.b_up is not None:
            hidden = hidden + self.b_up[...].astype(dtype)
        hidden = jax.nn.gelu(hidden, approximate=self.config.approximation == "tanh")
        hidden = tap("channel_hidden", constrain(hidden, "batch", "sequence", "mlp"))
        y = jnp.einsum("btf,fd->btd", hidden, self.w_down[...].astype(dtype))
        return y if self.b_down is None else y + self.b_down[...].astype(dtype)
