# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Configs of the two TTT layers. They differ in the inner model: what it is made of (`inner`), and
its rate."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from jaxmodels.slots import MixerConfig
from jaxmodels.ttt.layer import STATISTICS, VIEWS, TTTLayer
from pallas_kernels import ttt_linear, ttt_mlp

Backbone = Literal["transformer", "mamba"]


class Operations(NamedTuple):
    """Functions of `pallas_kernels` for one kind of inner model."""

    run: Callable[..., Any]
    init_state: Callable[..., Any]
    inner_losses: Callable[..., dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTT(MixerConfig):
    """What TTT-Linear and TTT-MLP have in common; choose one of those."""

    taps: ClassVar[tuple[str, ...]] = (*VIEWS, "ttt_inner", "ttt_out", *STATISTICS)
    takes_inner_lr: ClassVar[bool] = True

    num_heads: int
    """Heads H; each has its own inner model of width K = d_model / H."""
    mini_batch_size: int = 16
    """Tokens b whose inner gradients are taken at the same state."""
    base_lr: float = 1.0
    """Inner learning rate before the learned gate."""
    backbone: Backbone = "transformer"
    """`transformer`: q, k, v by three projections. `mamba`: q and k by one projection and a short
    convolution each, and a gate on the output."""
    conv_width: int = 4
    """Window of the convolutions of the Mamba backbone."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies; positions count inside the mini-batch."""
    eps: float = 1e-6
    """Of the inner norm and the norm before the output projection."""
    max_documents: int | None = None
    """Most documents in a packed row (`segment_ids`), each of which starts from the learned initial
    state: a row gets room for the unfilled mini-batches at their ends. Outputs of a document beyond
    are NaN. None refuses packed rows."""
    checkpoint_every: int = 16
    """Mini-batches between stored states in the backward pass; the rest is recomputed."""
    implementation: str | None = None
    """Of the inner loop, see `pallas_kernels.ttt_linear`; None picks the best that the device
    runs."""

    def __post_init__(self):
        for field in ("num_heads", "mini_batch_size", "checkpoint_every", "conv_width"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"max_documents={self.max_documents} must be at least 1, or None")
        if self.backbone not in ("transformer", "mamba"):
            raise ValueError(f"backbone={self.backbone!r}: one of transformer, mamba")

    @property
    def takes_segments(self) -> bool:
        return self.max_documents is not None

    def check(self, decoder):
        self.head_dim(decoder.d_model)

    def head_dim(self, d_model: int) -> int:
        """K. Raises ValueError where the heads do not divide the width, or K is odd."""
        if d_model % self.num_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of num_heads={self.num_heads}")
        head_dim = d_model // self.num_heads
        if head_dim % 2:
            raise ValueError(f"rotary embedding pairs channels: head width {head_dim} must be even")
        return head_dim

    def build(self, d_model, *, dtype="float32", param_dtype="float32", rngs):
        return TTTLayer(self, d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def inner(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Shapes per head of the inner model's parameters, in the order of the operation's
        state."""
        raise NotImplementedError

    @property
    def operations(self) -> Operations:
        """The inner loop and what belongs to it."""
        raise NotImplementedError

    def flops_per_token(self, d_model, sequence_length):
        D, inner = d_model, self.num_heads * self.inner_flops(self.head_dim(d_model))
        convolutions = 4 * D * self.conv_width if self.backbone == "mamba" else 0
        # q (with k), v, output and gate, or q, k, v and output: four products either way.
        return 8 * D * D + convolutions + 2 * D * self.num_heads + inner

    def inner_flops(self, head_dim: int) -> int:
        """FLOPs of the inner loop per token and head."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTLinear(TTT):
    """TTT-Linear: the inner model is f(k) = k + LN(k W + b)."""

    def inner(self, head_dim):
        return {"inner_w": (head_dim, head_dim), "inner_b": (head_dim,)}

    @property
    def operations(self):
        return Operations(ttt_linear.ttt_linear, ttt_linear.init_state, ttt_linear.inner_losses)

    def inner_flops(self, head_dim):
        return (6 * head_dim + 4 * self.mini_batch_size) * head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTMLP(TTT):
    """TTT-MLP: the inner model is f(k) = k + LN(gelu(k W1 + b1) W2 + b2), four times as wide
    inside."""

    base_lr: float = 0.1
    """Inner learning rate before the learned gate."""

    def inner(self, head_dim):
        K, F = head_dim, 4 * head_dim
        return {"inner_w1": (K, F), "inner_b1": (F,), "inner_w2": (F, K), "inner_b2": (K,)}

    @property
    def operations(self):
        return Operations(ttt_mlp.ttt_mlp, ttt_mlp.init_state, ttt_mlp.inner_losses)

    def inner_flops(self, head_dim):
        return (56 * head_dim + 20 * self.mini_batch_size) * head_dim
