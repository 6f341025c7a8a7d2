# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear on NVIDIA GPUs (Ampere and newer): Triton kernels, called through jax_triton."""

import jax.numpy as jnp

from pallas_kernels.ttt_common import triton_gpu
from pallas_kernels.ttt_common.triton_gpu import Stacked, padded, precision, result, run, spread

KERNELS = "pallas_kernels.ttt_linear.triton_kernels"


def unsupported(K, b, F, dtype):
    """Why the kernels cannot run here with these sizes, or None. F is not used."""
    del F
    if b > 32 and K > 64:
        return "mini-batches beyond 32 tokens do not fit a multiprocessor with K > 64"
    return triton_gpu.unsupported(K, b, dtype)


def forward(q, k, v, lr, pos_scale, weights, gamma, beta, *, eps, every):
    """Whole mini-batches: q, k, v (B, H, n b, K), weights w (B, H, K, K) and b (B, H, K).

    Returns the outputs, the last weights, and those at the start of every `every`-th mini-batch.
    """
    B, H, T, K = q.shape
    n = T // pos_scale.size
    groups = -(-n // every)
    rows = (spread(x, B, H) for x in (gamma, beta))
    out, w, bias, w_starts, bias_starts = run(
        f"{KERNELS}:forward_kernel",
        [q, k, v, lr, spread(pos_scale, B, H), *weights, *rows],
        [
            result(T, K, dtype=q.dtype),
            result(K, K),
            result(K),
            Stacked(result(groups, K, K)),
            Stacked(result(groups, K)),
        ],
        scalars=(n,),
        EVERY=every,
        EPS=eps,
        **_sizes(q, pos_scale),
    )
    return out, (w, bias), (w_starts, bias_starts)


def backward(q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights, *, eps, every):
    """The cotangents of q, k, v, lr, pos_scale, the first weights, gamma and beta."""
    B, H, T, K = q.shape
    n = T // pos_scale.size
    rows = (spread(x, B, H) for x in (gamma, beta))
    starts = (Stacked(x) for x in starts)
    tokens, row = result(T, K, dtype=q.dtype), result(K)
    dq, dk, dv, dlr, dpos, dw, dbias, dgamma, dbeta, *_ = run(
        f"{KERNELS}:backward_kernel",
        [q, k, v, lr, spread(pos_scale, B, H), *starts, *rows, d_out, *d_weights],
        [
            *(tokens, tokens, tokens, result(T), result(pos_scale.size)),
            *(result(K, K), row, row, row),
            *(result(every, K, K), result(every, K)),
        ],
        scalars=(n,),
        EVERY=every,
        EPS=eps,
        **_sizes(q, pos_scale),
    )
    sums = jnp.sum(dpos, (0, 1)), jnp.sum(dgamma, 0), jnp.sum(dbeta, 0)
    return dq, dk, dv, dlr, sums[0], (dw, dbias), *sums[1:]


def one_token(q, k, v, lr, scale, last, state, gamma, beta, *, eps):
    """The decode step: q, k, v (B, H, K), lr (B, H), scale and last (B,). The state is written in
    place where the caller donates it."""
    K = q.shape[-1]
    return triton_gpu.one_token(
        f"{KERNELS}:one_token_kernel", q, k, v, lr, scale, last, state, gamma, beta,
        EPS=eps, K=K, KP=padded(K),
    )  # fmt: skip


def _sizes(q, pos_scale):
    K, b = q.shape[-1], pos_scale.size
    return {
        "PRECISION": precision(q.dtype),
        "B": b,
        "BP": padded(b),
        "K": K,
        "KP": padded(K),
        "warps": 8,
        "stages": 1 if K > 64 else 2,
    }
