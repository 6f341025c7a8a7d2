# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Causal softmax attention with rotary positions, grouped queries and an explicit KV cache.

    y = W_o softmax( rot(x W_q) rot(x W_k)^T / sqrt(K) + causal ) (x W_v)

Letters: H query heads, G key/value heads, K head width, S cache length.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmodels.layers.rotary import RotaryLayout, rotary_table, rotate
from jaxmodels.sharding import any_mesh, constrain
from jaxmodels.slots import MixerConfig, Taps, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(MixerConfig):
    """Causal attention of the LLaMA family."""

    taps: ClassVar[tuple[str, ...]] = ("attention_heads",)
    takes_positions: ClassVar[bool] = True

    num_heads: int
    """Query heads H."""
    num_kv_heads: int | None = None
    """Key/value heads G; each serves H / G consecutive query heads. None means H."""
    head_dim: int | None = None
    """Head width K; None means d_model / num_heads."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_layout: RotaryLayout = "half"
    """Which channels form a pair."""
    implementation: Literal["xla", "cudnn"] | None = None
    """Passed to jax.nn.dot_product_attention; None lets JAX choose."""

    def __post_init__(self):
        if self.num_heads < 1 or (self.num_kv_heads is not None and self.num_kv_heads < 1):
            raise ValueError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: both must be at "
                "least 1"
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def takes_segments(self):
        return True

    def check(self, decoder):
        _head_dim(self, decoder.d_model)

    def build(self, d_model, *, dtype="float32", param_dtype="float32", rngs):
        return AttentionLayer(self, d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def flops_per_token(self, d_model, sequence_length):
        H, G = self.num_heads, self.num_kv_heads or self.num_heads
        K = _head_dim(self, d_model)
        projections = 2 * d_model * K * (2 * H + 2 * G)
        # A token sees (T + 1) / 2 keys on average; scores and values cost 2 K FLOPs each per key.
        return projections + 2 * H * K * (sequence_length + 1)


def _head_dim(config: Attention, d_model: int) -> int:
    if config.head_dim is None and d_model % config.num_heads:
        raise ValueError(
            f"d_model={d_model} is not a multiple of num_heads={config.num_heads}; change one or "
            "set head_dim"
        )
    head_dim = config.head_dim or d_model // config.num_heads
    if head_dim % 2:
        raise ValueError(f"rotary embedding pairs channels: head width {head_dim} must be even")
    return head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionState:
    """What decoding carries: rotated keys and values, and how many tokens each sequence has
    read."""

    k: jax.Array  # (B, S, G, K) in the compute dtype
    v: jax.Array  # (B, S, G, K)
    offset: jax.Array  # (B,) int32


class AttentionLayer(nnx.Module):
    """x (B, T, D) -> (y (B, T, D), state)."""

    def __init__(self, config: Attention, d_model, *, dtype="float32", param_dtype="float32", rngs):
        self.config, self.dtype = config, dtype
        H, G, K = (
            config.num_heads,
            config.num_kv_heads or config.num_heads,
            _head_dim(config, d_model),
        )
        axes = ("embed", "heads", "head_dim")
        self.wq = weight(rngs, (d_model, H, K), axes, param_dtype)
        self.wk = weight(rngs, (d_model, G, K), axes, param_dtype)
        self.wv = weight(rngs, (d_model, G, K), axes, param_dtype)
        self.wo = weight(rngs, (H, K, d_model), ("heads", "head_dim", "embed"), param_dtype)

    def init_state(self, batch_size: int, max_length: int) -> AttentionState:
        """An empty cache for `max_length` tokens. Outputs of tokens beyond it are NaN."""
        _, G, K = self.wk.shape
        zeros = jnp.zeros((batch_size, max_length, G, K), jnp.dtype(self.dtype))
        return AttentionState(k=zeros, v=zeros, offset=jnp.zeros((batch_size,), jnp.int32))

    @any_mesh(lambda batch: (P(batch), P(batch)))
    def __call__(
        self,
        x: jax.Array,
        *,
        state: AttentionState | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
        tap: Taps | None = None,
    ) -> tuple[jax.Array, AttentionState | None]:
        """Attends causally.

        Args:
          x: (B, T, D).
          state: continues after the tokens it has read, any T; None starts a full sequence.
          positions: (B, T) int for the rotary angles; None counts the valid tokens, from the
            state's offset or 0.
          segment_ids: (B, T) int; tokens see only their own segment. Not together with a state.
          valid: (B, T) bool: the other tokens (padding, on either side) are skipped as if they were
            not there; outputs at them mean nothing.
          tap: collects `attention_heads` (B, T, H, K), the input of the output projection.
        """
        tap = tap or Taps()
        B, T, _ = x.shape
        dtype = jnp.dtype(self.dtype)
        x = x.astype(dtype)
        q, k, v = (
            constrain(jnp.einsum("btd,dhk->bthk", x, w[...].astype(dtype)), *_HEADS)
            for w in (self.wq, self.wk, self.wv)
        )
        if valid is None:
            index = jnp.arange(T, dtype=jnp.int32)[None]
        else:
            index = jnp.maximum(jnp.cumsum(valid, 1, dtype=jnp.int32) - 1, 0)
        if state is not None:
            index = index + state.offset[:, None]  # (1 or B, T)
        positions = index if positions is None else positions
        cos, sin = rotary_table(positions, q.shape[-1], self.config.rope_theta)
        q, k = (
            rotate(y, cos[:, :, None], sin[:, :, None], self.config.rope_layout) for y in (q, k)
        )
        attend = jax.nn.dot_product_attention
        if state is None:
            mask = None
            if segment_ids is not None:
                mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
            if valid is not None:
                # Every query keeps itself, so that the softmax of none is empty.
                real = valid[:, None, None, :] | jnp.eye(T, dtype=bool)
                mask = real if mask is None else mask & real
            heads = attend(
                q, k, v, mask=mask, is_causal=True, implementation=self.config.implementation
            )
        else:
            if segment_ids is not None:
                raise ValueError(
                    "segment_ids cannot be combined with a state: decode documents apart"
                )
            rows, S = jnp.arange(B)[:, None], state.k.shape[1]
            slot = index if valid is None else jnp.where(valid, index, S)
            keys = state.k.at[rows, slot].set(k, mode="drop")
            values = state.v.at[rows, slot].set(v, mode="drop")
            mask = jnp.arange(S) <= index[:, None, :, None]  # (B, 1, T, S)
            heads = attend(q, keys, values, mask=mask, implementation=self.config.implementation)
            # A full cache must not pass for a short memory.
            heads = jnp.where((index < S)[:, :, None, None], heads, jnp.nan)
            read = T if valid is None else jnp.sum(valid, 1, dtype=jnp.int32)
            state = AttentionState(k=keys, v=values, offset=state.offset + read)
        heads = tap("attention_heads", constrain(heads, *_HEADS))
        return jnp.einsum("bthk,hkd->btd", heads, self.wo[...].astype(dtype)), state


_HEADS = ("batch", "sequence", "heads", None)
