# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner loop of TTT-Linear as one operation: the public call, its checks and its choice."""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_linear.reference import ttt_linear_reference
from pallas_kernels.ttt_linear.state import TTTLinearState
from pallas_kernels.ttt_linear.xla import ttt_linear_xla
from pallas_kernels.varying import match_varying

IMPLEMENTATIONS = {"xla": ttt_linear_xla, "reference": ttt_linear_reference}
"""By name. `reference` goes token by token and is for tests."""


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
        any T then continues from there. None says that all stand at the start of one: the sums in
        `state` are zero and are not read.
      valid: (B, T) bool, a prefix of each row. Tokens outside it, NaN included, change no state;
        their outputs mean nothing, but are finite.
      eps: added to the variance of the inner norm.
      checkpoint_every: mini-batches between the states that the forward pass stores for the
        backward pass, which recomputes the others. Saved per sequence and head: q, k, v and lr as
        given, and ceil(T / (b checkpoint_every)) states of 4 (K^2 + K) bytes; the backward pass
        itself needs room for checkpoint_every more. FLOPs per token, head: forward 6 K^2 + 4 b K,
        backward 20 K^2 + 12 b K with the recomputation. Does nothing where phase or valid is given:
        JAX differentiates that path.
      implementation: "xla", "reference", or None for the best that the device runs.

    Returns:
      out (B, H, T, K) in the dtype of q, and the state after the last valid token.

    Raises:
      ValueError: for shapes that do not fit, or an unknown implementation.
    """
    _check(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, checkpoint_every)
    name = "xla" if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: one of {sorted(IMPLEMENTATIONS)} or None"
        )
    # q, k and v stay as they are: the backward pass keeps them, and bfloat16 takes half the room.
    tokens = tuple(jnp.asarray(x) for x in (q, k, v))
    rest = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), (lr, pos_scale, state, ln_scale, ln_bias)
    )
    arrays, phase, valid = match_varying((tokens + rest, phase, valid))
    out, state = IMPLEMENTATIONS[name](
        *arrays, phase=phase, valid=valid, eps=eps, checkpoint_every=checkpoint_every
    )
    return out.astype(q.dtype), state


def _check(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, checkpoint_every):
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {q.shape}, expected (B, H, T, K), none of them 0")
    B, H, T, K = q.shape
    expected = {
        "k": (k, (B, H, T, K)),
        "v": (v, (B, H, T, K)),
        "lr": (lr, (B, H, T)),
        "state.w": (state.w, (B, H, K, K)),
        "state.b": (state.b, (B, H, K)),
        "state.w_sum": (state.w_sum, (B, H, K, K)),
        "state.b_sum": (state.b_sum, (B, H, K)),
        "ln_scale": (ln_scale, (H, K)),
        "ln_bias": (ln_bias, (H, K)),
        "phase": (phase, (B,)),
        "valid": (valid, (B, T)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {shape} because q is {q.shape}"
            )
    if pos_scale.ndim != 1 or pos_scale.size == 0:
        raise ValueError(f"pos_scale has shape {pos_scale.shape}, expected (b,) with b at least 1")
    floats = {"q": q, "k": k, "v": v, "lr": lr, "pos_scale": pos_scale}
    floats |= {"ln_scale": ln_scale, "ln_bias": ln_bias}
    floats |= {f"state.{name}": x for name, x in state._asdict().items()}
    for name, array in floats.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}, expected a float dtype")
    if phase is not None and not jnp.issubdtype(phase.dtype, jnp.integer):
        raise ValueError(f"phase has dtype {phase.dtype}, expected an integer dtype")
    if valid is not None and valid.dtype != bool:
        raise ValueError(f"valid has dtype {valid.dtype}, expected bool")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1")
