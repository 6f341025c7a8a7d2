# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner loop of TTT-Linear as one operation: the public call."""

import jax

from pallas_kernels.ttt_common.checks import check
from pallas_kernels.ttt_common.operation import run
from pallas_kernels.ttt_linear.state import TTTLinearState


def ttt_linear(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lr: jax.Array,
    pos_scale: jax.Array,
    state: TTTLinearState,
    ln_scale: jax.Array,
    ln_bias: jax.Array,
    *,
    phase: jax.Array | None = None,
    valid: jax.Array | None = None,
    reset: jax.Array | None = None,
    eps: float = 1e-6,
    checkpoint_every: int = 16,
    implementation: str | None = None,
) -> tuple[jax.Array, TTTLinearState]:
    """A linear model per head, f(k) = k + LN(k w + b), learns k -> v and is read by q.

    In mini-batches of b tokens, with g_j the gradient of 1/2 |f(k_j) - v_j|^2 at the mini-batch's
    start, its token i reads

        out_i = q_i + LN(q_i W_i + b_i),    W_i = W - pos_scale_i sum_{j <= i} lr_j k_j^T g_j

    and likewise for the bias; W_{b-1} is the state of the next mini-batch. Differentiable in every
    array, the final state included. All inner arithmetic is float32. Source: "Learning to (Learn at
    Test Time)", section 2; official `ttt_linear` code for the position factors.

    Args:
      q, k, v: (B, H, T, K), any float dtype and any T.
      lr: (B, H, T), the learning rate of each token (base rate, gate and 1 / K included).
      pos_scale: (b,), the factor of each place in a mini-batch; its length is the mini-batch size.
      state: from `init_state` or an earlier call.
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
        given, and ceil(T / (b checkpoint_every)) states of 4 (K^2 + K) bytes; the backward pass
        itself needs room for checkpoint_every more. FLOPs per token, head: forward 6 K^2 + 4 b K,
        backward 20 K^2 + 12 b K with the recomputation.
      implementation: "xla", "pallas_tpu", "triton_gpu", "reference", or None for the best that the
        device runs ("xla" where phase, valid or reset ask for what no kernel does).

    Returns:
      out (B, H, T, K) in the dtype of q, and the state after the last valid token.

    Raises:
      ValueError: for shapes that do not fit, an unknown implementation, or one that cannot do what
        is asked.
    """
    K = q.shape[-1]
    check(
        ((K, K), (K,)), q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, reset,
        checkpoint_every,
    )  # fmt: skip
    return run(
        "pallas_kernels.ttt_linear",
        K,
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
