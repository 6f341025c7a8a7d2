# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear on NVIDIA GPUs (Ampere, Ada, Hopper): Triton kernels, called through jax_triton.

One program per sequence and head goes through the mini-batches. Forward: the state (W, b) stays in
registers in float32, a mini-batch's tiles pass through shared memory, and every `every`-th state
is stored. Backward: groups in reverse; W and dW are in registers; the states of one group are
recomputed into scratch of 4 `every` (K^2 + K) bytes per program, which the L2 cache mostly holds.
A mini-batch of more than 16 tokens goes in chunks of 16 with sums of its own (`triton_kernels`),
one state more in scratch for each chunk.

Per token and head, K = 64, b = 16, every = 16:

    forward    6 K^2 + 4 b K FLOPs    28,672    1,093 bytes of float32, 581 of bfloat16
    backward  20 K^2 + 12 b K         94,208    2,381, and 1,229; and 2,080 of scratch
    one_token  8 K^2                  32,768   49,152 (12 K^2), and 4 K^2 where a mini-batch ends

and with larger b 8 K^2 + 64 K and 26 K^2 + 192 K. Of an H100, 8 warps with up to 255 registers per
thread: shared memory in KiB, and bytes spilled per thread in parentheses,

                          forward: float32   bfloat16   backward: float32   bfloat16
    K = 64, b = 16                      40         24           56 (1,116)    45 (80)
    K = 64, b = 64                 68 (40)         36          120 (1,724)    77 (340)
    K = 96, b = 16             136 (1,388)    64 (44)          168 (7,828)   145 (1,360)

and one_token 2 to 4. K = 96 is padded to 128. Products of float32 inputs are three TF32 products
each, of bfloat16 inputs one (`precision`).
"""

import jax.numpy as jnp

from pallas_kernels.ttt_common import triton_gpu
from pallas_kernels.ttt_common.triton_gpu import Stacked, padded, precision, result, run, spread

KERNELS = "pallas_kernels.ttt_linear.triton_kernels"


def unsupported(K, b, F, dtype):
    """Why the kernels cannot run here with these sizes, or None. F is not used."""
    del F
    if K > 64 and b > 16:
        return "with K > 64 the sums of a mini-batch beyond 16 tokens do not fit a multiprocessor"
    return triton_gpu.unsupported(K, dtype)


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
    sizes = _sizes(q, pos_scale)
    chunks = sizes["CHUNKS"]
    slots = 1 if chunks == 1 else chunks + 1
    dq, dk, dv, dlr, dpos, dw, dbias, dgamma, dbeta, *_ = run(
        f"{KERNELS}:backward_kernel",
        [q, k, v, lr, spread(pos_scale, B, H), *starts, *rows, d_out, *d_weights],
        [
            *(tokens, tokens, tokens, result(T), result(pos_scale.size)),
            *(result(K, K), row, row, row),
            *(result(every * slots, K, K), result(every * slots, K)),
        ],
        scalars=(n,),
        EVERY=every,
        EPS=eps,
        PARTS=1 << (chunks - 1).bit_length(),
        SLOTS=slots,
        **sizes,
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
        "BP": 16,
        "CHUNKS": -(-b // 16),
        "K": K,
        "KP": padded(K),
        "warps": 8,
        "stages": 1 if K > 64 else 2,
    }
