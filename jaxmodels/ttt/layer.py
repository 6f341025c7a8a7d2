# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The TTT layer: a sequence mixer whose hidden state is a model trained at test time.

Every head carries an inner model f that learns, token by token, to turn the key view of the text
into its value view; the query view asks it. TTT-Linear: f(k) = k + LN(k W + b). TTT-MLP:
f(k) = k + LN(gelu(k W1 + b1) W2 + b2). With g_j the gradient of 1/2 |f(k_j) - v_j|^2 at the start
of a mini-batch of b tokens, its token i reads with

    W_i = W - t_i sum_{j <= i} l_j k_j^T g_j,    l_j = base_lr sigmoid(x_j w_lr + c_lr) / K,
    t_i = max(0, 1 / (i + 1) + delta_i)

The Mamba backbone makes q and k from one projection by a short causal convolution each, and gates
the output: y = W_o (gelu(x W_g) * LN(o)) instead of y = W_o LN(o).

Letters: B batch, T sequence, D model width, H heads, K head width, b inner mini-batch, n whole
mini-batches. Source: "Learning to (Learn at Test Time)", section 2, and the official JAX code for
the position factors t_i, which the paper leaves out.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmodels.layers.convolution import CausalConv
from jaxmodels.layers.norms import LayerNorm
from jaxmodels.layers.rotary import rotary_table, rotate
from jaxmodels.sharding import any_mesh, constrain, local
from jaxmodels.slots import Taps, constant, weight
from jaxmodels.ttt.documents import lay_documents

if TYPE_CHECKING:
    from jaxmodels.ttt.config import TTT

VIEWS = ("ttt_q", "ttt_k", "ttt_v", "ttt_lr")
"""Taps of what the inner loop reads, (B, H, T, K) and (B, H, T)."""

STATISTICS = ("ttt_loss_initial", "ttt_loss_before", "ttt_loss_after", "ttt_target_spread")
"""Taps with one value per whole mini-batch, (B, H, n); see `TTTLayer`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TTTLayerState:
    """What decoding carries, of a size that does not depend on the length read so far."""

    inner: Any
    """`TTTLinearState` or `TTTMLPState`: fast weights and running sums, float32."""
    offset: jax.Array
    """(B,) int32, tokens read; offset mod b is the place inside the mini-batch."""
    conv: jax.Array | None
    """(B, W - 1, H K): the last inputs of both convolutions (Mamba backbone)."""


class TTTLayer(nnx.Module):
    """x (B, T, D) -> (y (B, T, D), state)."""

    def __init__(self, config: "TTT", d_model, *, dtype="float32", param_dtype="float32", rngs):
        self.config, self.dtype = config, dtype
        H, K = config.num_heads, config.head_dim(d_model)
        project = lambda: weight(rngs, (d_model, H, K), ("embed", "heads", "head_dim"), param_dtype)
        mamba = config.backbone == "mamba"
        self.wq = project()
        self.wk = None if mamba else project()
        self.wv = project()
        self.wo = weight(rngs, (H * K, d_model), ("heads", "embed"), param_dtype)
        self.lr_kernel = weight(rngs, (d_model, H), ("embed", "heads"), param_dtype)
        self.lr_bias = constant(0.0, (H,), ("heads",), param_dtype)
        self.position_offset = constant(0.0, (config.mini_batch_size,), (None,), param_dtype)
        for name, shape in config.inner(K).items():
            axes = ("heads", *("inner",) * len(shape))
            if len(shape) == 1:
                setattr(self, name, constant(0.0, (H, *shape), axes, param_dtype))
            else:
                setattr(self, name, weight(rngs, (H, *shape), axes, param_dtype))
        self.inner_norm_scale = constant(1.0, (H, K), ("heads", "inner"), param_dtype)
        self.inner_norm_bias = constant(0.0, (H, K), ("heads", "inner"), param_dtype)
        self.out_norm = LayerNorm(eps=config.eps).build(H * K, param_dtype=param_dtype)
        conv = CausalConv(width=config.conv_width)
        convolution = lambda: conv.build(H * K, axis="heads", param_dtype=param_dtype, rngs=rngs)
        self.conv_q = convolution() if mamba else None
        self.conv_k = convolution() if mamba else None
        self.w_gate = (
            weight(rngs, (d_model, H * K), ("embed", "heads"), param_dtype) if mamba else None
        )

    def init_state(self, batch_size: int, max_length: int | None = None) -> TTTLayerState:
        """The learned initial state for every sequence; `max_length` is accepted and not needed."""
        weights = (getattr(self, name)[...] for name in self.config.inner(1))
        return TTTLayerState(
            inner=self.config.operations.init_state(*weights, batch_size),
            offset=jnp.zeros((batch_size,), jnp.int32),
            conv=None if self.conv_q is None else self.conv_q.init_state(batch_size, self.dtype),
        )

    @any_mesh(lambda batch: (P(batch), P(batch)))
    def __call__(
        self,
        x: jax.Array,
        *,
        state: TTTLayerState | None = None,
        valid: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        inner_lr_scale: jax.Array | None = None,
        tap: Taps | None = None,
    ) -> tuple[jax.Array, TTTLayerState | None]:
        """Learns from x and reads from what was learned.

        Args:
          x: (B, T, D), any T.
          state: continues after the tokens it has read, each row at its own place; None starts from
            the learned state and returns None.
          valid: (B, T) bool: the other tokens (padding, on either side) are skipped as if they were
            not there; outputs at them mean nothing.
          segment_ids: (B, T) int, one run of equal ids per packed document, 0 for padding: each
            document starts from the learned initial state. Needs `max_documents` in the config; not
            together with a state or `valid`.
          inner_lr_scale: () float, multiplies all inner learning rates (their warm-up in training).
          tap: collects `ttt_q`, `ttt_k` and `ttt_v` (B, H, T, K), the views after convolution and
            rotation; `ttt_lr` (B, H, T) float32, the inner learning rates; `ttt_inner` (B, T, H K),
            the readings of the inner model; `ttt_out` (B, T, H K), the input of the output
            projection; and per whole mini-batch, (B, H, n) float32, the mean squared error of the
            inner model at the mini-batch's last token under the learned initial state
            (`ttt_loss_initial`), the state at the mini-batch's start (`ttt_loss_before`) and the
            state after it (`ttt_loss_after`), and how far the target v - k, before the rotation, at
            its first token lies from the mean target of the sequence (`ttt_target_spread`, the mean
            square over K).

        Raises:
          ValueError: for arguments that exclude each other.
        """
        tap = tap or Taps()
        config = self.config
        self._check(state, valid, segment_ids, tap)
        B, T, _ = x.shape
        b, dtype = config.mini_batch_size, jnp.dtype(self.dtype)
        x = x.astype(dtype)

        layout = None
        if segment_ids is not None:
            layout = lay_documents(segment_ids, b, config.max_documents or 1)
            place = layout.position
        elif valid is not None:
            place = jnp.cumsum(valid, 1, dtype=jnp.int32) - 1
        else:
            place = jnp.arange(T, dtype=jnp.int32)[None]
        phase = None
        if state is not None:
            phase = state.offset % b
            place = place + phase[:, None]
        elif valid is not None:
            phase = jnp.zeros((B,), jnp.int32)

        q, k, v, conv = self._views(x, state, valid, segment_ids)
        if "ttt_target_spread" in tap.names:
            tap("ttt_target_spread", _target_spread(k, v, b))
        cos, sin = rotary_table(jnp.arange(b), q.shape[-1], config.rope_theta)
        cos, sin = cos[place % b][:, None], sin[place % b][:, None]  # (1 or B, 1, T, K / 2)
        q, k = (rotate(y, cos, sin, "interleaved") for y in (q, k))
        lr = self._learning_rates(x)
        if inner_lr_scale is not None:
            lr = lr * inner_lr_scale
        for name, view in zip(VIEWS, (q, k, v, lr)):
            tap(name, view)
        pos_scale = jnp.maximum(0.0, 1.0 / jnp.arange(1, b + 1) + self.position_offset[...])

        inner = (self.init_state(B) if state is None else state).inner
        norm = self.inner_norm_scale[...], self.inner_norm_bias[...]
        if tap.names & set(STATISTICS[:3]):
            losses = config.operations.inner_losses(
                k, v, lr, pos_scale, inner, *norm, eps=config.eps
            )
            for name, values in losses.items():
                tap(f"ttt_loss_{name}", values)
        if layout is not None:
            q, k, v, lr = map(layout.spread, (q, k, v, lr))
        out, inner = self._inner_loop(
            q,
            k,
            v,
            lr,
            pos_scale,
            inner,
            *norm,
            phase=phase,
            valid=valid,
            reset=None if layout is None else layout.reset,
        )
        if layout is not None:
            out = layout.collect(out)
        if state is not None:
            read = T if valid is None else jnp.sum(valid, 1, dtype=jnp.int32)
            state = TTTLayerState(inner=inner, offset=state.offset + read, conv=conv)
        out = tap("ttt_inner", jnp.einsum("bhtk->bthk", out).reshape(B, T, -1))
        out = self.out_norm(out)
        if self.w_gate is not None:
            gate = jnp.einsum("btd,de->bte", x, self.w_gate[...].astype(dtype))
            out = jax.nn.gelu(gate, approximate=True) * out
        out = tap("ttt_out", out)
        return jnp.einsum("btd,de->bte", out, self.wo[...].astype(dtype)), state

    def _check(self, state, valid, segment_ids, tap):
        name = type(self.config).__name__
        if segment_ids is not None:
            if self.config.max_documents is None:
                raise ValueError(
                    f"segment_ids: set max_documents in {name} to the most documents that a row "
                    "holds"
                )
            if state is not None or valid is not None:
                raise ValueError(
                    "segment_ids cannot be combined with a state or valid: decode documents apart, "
                    "and mark padding by id 0"
                )
        if any(x is not None for x in (state, valid, segment_ids)) and tap.names & set(STATISTICS):
            raise ValueError(
                f"the taps {sorted(tap.names & set(STATISTICS))} need plain sequences from their "
                "start: no state, valid or segment_ids"
            )

    def _views(self, x, state, valid, segment_ids):
        """q, k, v (B, H, T, K) before the rotation, and the state of the convolutions."""
        dtype = x.dtype
        if self.wk is not None:
            q, k, v = (
                constrain(jnp.einsum("btd,dhk->bhtk", x, w[...].astype(dtype)), *_HEADS)
                for w in (self.wq, self.wk, self.wv)
            )
            return q, k, v, None
        B, T, _ = x.shape
        H, K = self.wq.shape[1:]
        shared = jnp.einsum("btd,dhk->bthk", x, self.wq[...].astype(dtype)).reshape(B, T, H * K)
        options = dict(
            state=None if state is None else state.conv, valid=valid, segment_ids=segment_ids
        )
        q, tail = self.conv_q(shared, **options)
        k, _ = self.conv_k(shared, **options)
        q, k = (jnp.einsum("bthk->bhtk", y.reshape(B, T, H, K)) for y in (q, k))
        v = jnp.einsum("btd,dhk->bhtk", x, self.wv[...].astype(dtype))
        return *(constrain(y, *_HEADS) for y in (q, k, v)), tail

    def _learning_rates(self, x):
        """(B, H, T) float32."""
        gate = jnp.einsum("btd,dh->bht", x.astype(jnp.float32), self.lr_kernel[...])
        gate = jax.nn.sigmoid(gate + self.lr_bias[...][:, None])
        return self.config.base_lr * gate / self.wq.shape[-1]

    def _inner_loop(self, q, k, v, lr, pos_scale, inner, scale, bias, **places):
        """The operation on each device's rows and heads: a kernel knows nothing of meshes."""
        config = self.config
        given = {name: value for name, value in places.items() if value is not None}

        def run(q, k, v, lr, pos_scale, inner, scale, bias, given):
            return config.operations.run(
                q,
                k,
                v,
                lr,
                pos_scale,
                inner,
                scale,
                bias,
                **given,
                eps=config.eps,
                checkpoint_every=config.checkpoint_every,
                implementation=config.implementation,
            )

        rows, heads = ("batch", "heads"), ("heads",)
        names = (rows, rows, rows, rows, (), rows, heads, heads, ("batch",))
        return local(run, names, (rows, rows))(q, k, v, lr, pos_scale, inner, scale, bias, given)


def _target_spread(k, v, b):
    whole = k.shape[2] // b * b
    target = v.astype(jnp.float32) - k.astype(jnp.float32)
    spread = target[:, :, :whole:b] - jnp.mean(target, 2, keepdims=True)
    return jnp.mean(jnp.square(spread), -1)


_HEADS = ("batch", "heads", "sequence", None)
