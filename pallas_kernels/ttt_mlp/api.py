# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner loop of TTT-MLP as one operation: the public call."""

import jax

from pallas_kernels.ttt_common.checks import check
from pallas_kernels.ttt_common.operation import run
from pallas_kernels.ttt_mlp.state import TTTMLPState


def ttt_mlp(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lr: jax.Array,
    pos_scale: jax.Array,
    state: TTTMLPState,
    ln_scale: jax.Array,
    ln_bias: jax.Array,
    *,
    phase: jax.Array | None = None,
    valid: jax.Array | None = None,
    reset: jax.Array | None = None,
    eps: float = 1e-6,
    checkpoint_every: int = 16,
    implementation: str | None = None,
) -> tuple[jax.Array, TTTMLPState]:
    """A model of two layers per head, f(k) = k + LN(gelu(k w1 + b1) w2 + b2), learns k -> v and is
    read by q.

    In mini-batches of b tokens, with g1_j and g2_j the gradients of 1/2 |f(k_j) - v_j|^2 with
    respect to the results of the two layers, at the mini-batch's start, its token i reads

        out_i = q_i + LN(gelu(q_i W1_i + b1_i) W2_i + b2_i),
        W1_i = W1 - pos_scale_i sum_{j <= i} lr_j k_j^T g1_j,
        W2_i = W2 - pos_scale_i sum_{j <= i} lr_j gelu(k_j W1 + b1)^T g2_j

    and likewise for the biases; W1_{b-1} and W2_{b-1} are the state of the next mini-batch. GELU is
    the tanh approximation. Differentiable in every array, the final state included. All inner
    arithmetic is float32. Source: "Learning to (Learn at Test Time)", section 2; official `ttt_mlp`
    code for the position factors.

    Args:
      q, k, v: (B, H, T, K), any float dtype and any T.
      lr: (B, H, T), the learning rate of each token (base rate, gate and 1 / K included).
      pos_scale: (b,), the factor of each place in a mini-batch; its length is the mini-batch size.
      state: from `init_state` or an earlier call; its hidden width F may be any.
      ln_scale, ln_bias: (H, K), the inner norm.
      phase: (B,) int32, how many tokens of its mini-batch each sequence has read, 0 <= phase < b;
        any T then continues from there. None, with valid None too, says that all stand at the start
        of one: the sums in `state` are zero and are not read.
      valid: (B, T) bool, the tokens that count. The others, NaN included, are skipped as if they
        were not there; their outputs are 0.
      reset: (B, ceil(T / b)) bool, mini-batches that start again from the weights in `state`
        (packed documents that begin on a mini-batch). Not with phase or valid.
      eps: added to the variance of the inner norm.
      checkpoint_every: mini-batches between the states that the forward pass stores for the
        backward pass, which recomputes the others. Saved per sequence and head: q, k, v and lr as
        given, and ceil(T / (b checkpoint_every)) states of 4 (2 K F + F + K) bytes; the backward
        pass itself needs room for checkpoint_every more. FLOPs per token, head: forward
        14 K F + 4 b (K + F), backward 48 K F + 12 b (K + F) with the recomputation.
      implementation: "xla", "pallas_tpu", "triton_gpu", "reference", or None for the best that the
        device runs ("xla" where phase, valid or reset ask for what no kernel does).

    Returns:
      out (B, H, T, K) in the dtype of q, and the state after the last valid token.

    Raises:
      ValueError: for shapes that do not fit, an unknown implementation, or one that cannot do what
        is asked.
    """
    K, F = q.shape[-1], state.w1.shape[-1]
    check(
        ((K, F), (F,), (F, K), (K,)), q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase,
        valid, reset, checkpoint_every,
    )  # fmt: skip
    return run(
        "pallas_kernels.ttt_mlp",
        F,
        q,
        k,
        v,
        lr,
        pos_scale,
        state,
        ln_scale,
        ln_bias,
        phase=phase,
        valid=valid,
        reset=reset,
        eps=eps,
        checkpoint_every=checkpoint_every,
        implementation=implementation,
    )
