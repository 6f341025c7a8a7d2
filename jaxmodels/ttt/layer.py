# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The TTT-Linear layer: a sequence mixer whose hidden state is a linear model trained at test time.

Every head carries a linear map f(k) = k + LN(k W + b) that learns, token by token, to turn the key
view of the text into its value view; the query view asks it. With g_j the gradient of
1/2 |f(k_j) - v_j|^2 at the start of a mini-batch of b tokens, its token i reads with

    W_i = W - t_i sum_{j <= i} l_j k_j^T g_j,    l_j = base_lr sigmoid(x_j w_lr + c_lr) / K,
    t_i = max(0, 1 / (i + 1) + delta_i)

Letters: B batch, T sequence, D model width, H heads, K head width, b inner mini-batch. Source:
"Learning to (Learn at Test Time)", section 2, and the official JAX code for the position factors
t_i, which the paper leaves out.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmodels.layers.norms import LayerNorm
from jaxmodels.layers.rotary import rotary_table, rotate
from jaxmodels.sharding import any_mesh, constrain
from jaxmodels.slots import MixerConfig, Taps, constant, weight
from pallas_kernels.ttt_linear import TTTLinearState, init_state, ttt_linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTLinear(MixerConfig):
    """TTT-Linear with the Transformer backbone."""

    taps: ClassVar[tuple[str, ...]] = ("ttt_inner", "ttt_out")

    num_heads: int
    """Heads H; each has its own inner model of width K = d_model / H."""
    mini_batch_size: int = 16
    """Tokens b whose inner gradients are taken at the same state."""
    base_lr: float = 1.0
    """Inner learning rate before the learned gate."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies; positions count inside the mini-batch."""
    eps: float = 1e-6
    """Of the inner norm and the norm before the output projection."""
    checkpoint_every: int = 16
    """Mini-batches between stored states in the backward pass; the rest is recomputed."""
    implementation: str | None = None
    """Of the inner loop, see `pallas_kernels.ttt_linear`; None picks the best that the device
    runs."""

    def __post_init__(self):
        for field in ("num_heads", "mini_batch_size", "checkpoint_every"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")

    def check(self, decoder):
        _head_dim(self, decoder.d_model)

    def build(self, d_model, *, dtype="float32", param_dtype="float32", rngs):
        return TTTLinearLayer(self, d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def flops_per_token(self, d_model, sequence_length):
        H, K, b = self.num_heads, _head_dim(self, d_model), self.mini_batch_size
        return 8 * d_model * H * K + 2 * d_model * H + H * (6 * K * K + 4 * b * K)


def _head_dim(config: TTTLinear, d_model: int) -> int:
    if d_model % config.num_heads:
        raise ValueError(f"d_model={d_model} is not a multiple of num_heads={config.num_heads}")
    head_dim = d_model // config.num_heads
    if head_dim % 2:
        raise ValueError(f"rotary embedding pairs channels: head width {head_dim} must be even")
    return head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TTTLinearLayerState:
    """What decoding carries, of a size that does not depend on the length read so far.

    2 H (K^2 + K) float32 numbers per sequence.
    """

    inner: TTTLinearState
    offset: jax.Array  # (B,) int32, tokens read; offset mod b is the place inside the mini-batch


class TTTLinearLayer(nnx.Module):
    """x (B, T, D) -> (y (B, T, D), state)."""

    def __init__(self, config: TTTLinear, d_model, *, dtype="float32", param_dtype="float32", rngs):
        self.config, self.dtype = config, dtype
        H, K = config.num_heads, _head_dim(config, d_model)
        axes = ("embed", "heads", "head_dim")
        self.wq = weight(rngs, (d_model, H, K), axes, param_dtype)
        self.wk = weight(rngs, (d_model, H, K), axes, param_dtype)
        self.wv = weight(rngs, (d_model, H, K), axes, param_dtype)
        self.wo = weight(rngs, (H * K, d_model), ("heads", "embed"), param_dtype)
        self.lr_kernel = weight(rngs, (d_model, H), ("embed", "heads"), param_dtype)
        self.lr_bias = constant(0.0, (H,), ("heads",), param_dtype)
        self.position_offset = constant(0.0, (config.mini_batch_size,), (None,), param_dtype)
        self.inner_w = weight(rngs, (H, K, K), ("heads", "inner", "inner"), param_dtype)
        self.inner_b = constant(0.0, (H, K), ("heads", "inner"), param_dtype)
        self.inner_norm_scale = constant(1.0, (H, K), ("heads", "inner"), param_dtype)
        self.inner_norm_bias = constant(0.0, (H, K), ("heads", "inner"), param_dtype)
        self.out_norm = LayerNorm(eps=config.eps).build(H * K, param_dtype=param_dtype)

    def init_state(self, batch_size: int, max_length: int | None = None) -> TTTLinearLayerState:
        """The learned initial state for every sequence; `max_length` is accepted and not needed."""
        inner = init_state(self.inner_w[...], self.inner_b[...], batch_size)
        return TTTLinearLayerState(inner=inner, offset=jnp.zeros((batch_size,), jnp.int32))

    @any_mesh(lambda batch: (P(batch), P(batch)))
    def __call__(
        self,
        x: jax.Array,
        *,
        state: TTTLinearLayerState | None = None,
        valid: jax.Array | None = None,
        tap: Taps | None = None,
    ) -> tuple[jax.Array, TTTLinearLayerState | None]:
        """Learns from x and reads from what was learned.

        Args:
          x: (B, T, D), any T.
          state: continues after the tokens it has read; None starts from the learned state and
            returns None.
          valid: (B, T) bool with a state: a prefix of each row; the rest is padding and is not
            learned.
          tap: collects `ttt_inner` (B, T, H K), the readings of the inner model, and `ttt_out` (B,
            T, H K), the input of the output projection.
        """
        tap = tap or Taps()
        B, T, _ = x.shape
        config, dtype = self.config, jnp.dtype(self.dtype)
        x = x.astype(dtype)
        q, k, v = (
            constrain(jnp.einsum("btd,dhk->bhtk", x, w[...].astype(dtype)), *_HEADS)
            for w in (self.wq, self.wk, self.wv)
        )
        b = config.mini_batch_size
        slot = jnp.arange(T, dtype=jnp.int32)[None]
        phase = None
        if state is not None:
            phase = state.offset % b
            slot = slot + phase[:, None]
        cos, sin = rotary_table(jnp.arange(b), q.shape[-1], config.rope_theta)
        cos, sin = cos[slot % b][:, None], sin[slot % b][:, None]  # (1 or B, 1, T, K / 2)
        q, k = (rotate(y, cos, sin, "interleaved") for y in (q, k))

        gate = jnp.einsum("btd,dh->bht", x.astype(jnp.float32), self.lr_kernel[...])
        gate = jax.nn.sigmoid(gate + self.lr_bias[...][:, None])
        lr = config.base_lr * gate / q.shape[-1]
        pos_scale = jnp.maximum(0.0, 1.0 / jnp.arange(1, b + 1) + self.position_offset[...])
        inner = self.init_state(B).inner if state is None else state.inner
        out, inner = ttt_linear(
            q,
            k,
            v,
            lr,
            pos_scale,
            inner,
            self.inner_norm_scale[...],
            self.inner_norm_bias[...],
            phase=phase,
            valid=valid if state is not None else None,
            eps=config.eps,
            checkpoint_every=config.checkpoint_every,
            implementation=config.implementation,
        )
        if state is not None:
            read = T if valid is None else jnp.sum(valid, 1, dtype=jnp.int32)
            state = TTTLinearLayerState(inner=inner, offset=state.offset + read)
        out = tap("ttt_inner", jnp.einsum("bhtk->bthk", out).reshape(B, T, -1))
        out = tap("ttt_out", self.out_norm(out))
        return jnp.einsum("btd,de->bte", out, self.wo[...].astype(dtype)), state


_HEADS = ("batch", "heads", "sequence", None)
