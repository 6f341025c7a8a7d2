# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Causal depthwise convolution over a short window, with an explicit state.

    y[t] = bias + sum_k kernel[k] * x[t - (W - 1) + k],    zeros before the start

Letters: W window, C channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmodels.layers.padding import compact
from jaxmodels.slots import constant, weight
from pallas_kernels.varying import match_varying


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalConv:
    """Depthwise convolution with a bias per channel and no activation."""

    width: int = 4
    """Window W: each channel sees its last W values, the current one included."""

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1")

    def build(
        self, channels: int, *, axis: str | None = None, param_dtype: str = "float32", rngs
    ) -> "CausalConvLayer":
        """The module; `axis` is the logical name of the channels."""
        return CausalConvLayer(self, channels, axis=axis, param_dtype=param_dtype, rngs=rngs)


class CausalConvLayer(nnx.Module):
    """x (B, T, C) -> y (B, T, C) in the dtype of x, summed in float32."""

    def __init__(self, config: CausalConv, channels, *, axis=None, param_dtype="float32", rngs):
        self.config = config
        # Each output sums W values of its own channel: variance 1 / W.
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

        def kernel(key, shape, dtype=jnp.float32, out_sharding=None):
            return init(key, (shape[0], 1, shape[1]), dtype, out_sharding)[:, 0]

        self.kernel = weight(rngs, (config.width, channels), (None, axis), param_dtype, kernel)
        self.bias = constant(0.0, (channels,), (axis,), param_dtype)

    def init_state(self, batch_size: int, dtype: str = "float32") -> jax.Array:
        """The W - 1 inputs before the first: zeros (B, W - 1, C)."""
        width, channels = self.kernel.shape
        return jnp.zeros((batch_size, width - 1, channels), jnp.dtype(dtype))

    def __call__(
        self,
        x: jax.Array,
        *,
        state: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Convolves x.

        Args:
          x: (B, T, C), any T.
          state: (B, W - 1, C), the inputs before x; None starts the sequence and returns None.
          segment_ids: (B, T) int; a window does not reach over the start of a segment. Not together
            with a state.
          valid: (B, T) bool; the other tokens are skipped as if they were not there.

        Returns:
          y (B, T, C), and the state after x if one was given.
        """
        T, width = x.shape[1], self.config.width
        moves = None
        if valid is not None and T > 1:
            moves = compact(valid)
            x = moves.front(x)
            segment_ids = None if segment_ids is None else moves.front(segment_ids)
        if state is None:
            history = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
        else:
            history = jnp.concatenate([state.astype(x.dtype), x], 1)
        inside = None
        if segment_ids is not None:
            before = jnp.pad(segment_ids, ((0, 0), (width - 1, 0)))
            inside = jnp.stack([before[:, k : k + T] == segment_ids for k in range(width)])
        arrays = history, self.kernel[...], self.bias[...], inside
        y = _convolve(*match_varying(arrays))
        if state is not None:
            if valid is None:
                state = history[:, T:].astype(state.dtype)
            else:
                kept = jnp.sum(valid, 1)[:, None] + jnp.arange(width - 1)
                state = jnp.take_along_axis(history, kept[..., None], 1).astype(state.dtype)
        return (y if moves is None else moves.back(y)), state


@jax.custom_vjp
def _convolve(history, kernel, bias, inside):
    """history (B, W - 1 + T, C) -> (B, T, C); inside (W, B, T) bool or None: windows that end at
    each token reach that far."""
    y = bias.astype(jnp.float32)
    for k, part in enumerate(_parts(history, kernel, inside)):
        y = y + part * kernel[k].astype(jnp.float32)
    return y.astype(history.dtype)


def _parts(history, kernel, inside):
    """What each entry of the kernel sees, (B, T, C) float32."""
    width = len(kernel)
    T = history.shape[1] - width + 1
    parts = (history[:, k : k + T].astype(jnp.float32) for k in range(width))
    if inside is None:
        return parts
    return (jnp.where(mask[..., None], part, 0.0) for mask, part in zip(inside, parts))


def _convolve_backward(saved, d_y):
    """Sums over tokens as einsums: JAX's own are slow on a CPU (see `norms`)."""
    history, kernel, bias, inside = saved
    d_y = d_y.astype(jnp.float32)
    parts = _parts(history, kernel, inside)
    d_kernel = jnp.stack([jnp.einsum("btc,btc->c", d_y, x, precision="highest") for x in parts])
    d_history = jnp.zeros(history.shape, jnp.float32)
    for k, weights in enumerate(kernel.astype(jnp.float32)):
        part = d_y * weights
        if inside is not None:
            part = jnp.where(inside[k][..., None], part, 0.0)
        after = len(kernel) - 1 - k
        d_history = d_history + jnp.pad(part, ((0, 0), (k, after), (0, 0)))
    d_bias = jnp.sum(d_y, (0, 1))
    return (
        d_history.astype(history.dtype),
        d_kernel.astype(kernel.dtype),
        d_bias.astype(bias.dtype),
        None,
    )


_convolve.defvjp(lambda *args: (_convolve(*args), args), _convolve_backward)
