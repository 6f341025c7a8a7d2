# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-MLP on NVIDIA GPUs (Ampere, Ada, Hopper): Triton kernels, called through jax_triton.

One program per sequence and head goes through the mini-batches. W1 and W2 of one head (128 KiB in
float32 at K = 64) and their cotangents do not fit a multiprocessor together, so all of them live in
global memory, where the L2 cache holds what is in use, and pass through shard by shard (`shard`
columns of W1 with as many rows of W2), float32 throughout. In registers are the b x K tiles of one
mini-batch: Z2 and Zb2 sum over the shards.

Forward: per mini-batch a first pass for Z2 and G2, a second one that reads and updates the weights
in place (in what becomes the last weights). Backward: groups in reverse; the states of one group
are recomputed into scratch, 4 (every + 1) (2 K F + F) bytes per program, with Z2, Zb2 and A2 of
each mini-batch; then, per mini-batch, one pass for all that comes before the second-order piece and
one for what follows it. dW1 and dW2 are updated in place in what becomes the result. A mini-batch
of more than 16 tokens goes in chunks of 16, as in `ttt_linear`, with its sums and their cotangents
in scratch too.

Per token and head, K = 64, F = 4 K, b = 16, every = 16:

    forward    64 K^2 + 20 b K FLOPs  282,624    1,545 bytes of float32, 1,033 of bfloat16; L2 25 KB
    backward  208 K^2 + 70 b K        923,648    2,833, and 1,681;                          L2 78 KB
    one_token  80 K^2                 327,680  393,216 (96 K^2)

and with larger b 80 K^2 + 320 K and 264 K^2 + 1120 K. The FLOPs include what is computed twice: Z1
in each pass, the forward pass in the backward one. Of an H100, 8 warps with 255 registers per
thread: shared memory in KiB, and bytes spilled per thread in parentheses,

                          forward: float32   bfloat16   backward: float32   bfloat16
    K = 64, b = 16                42 (776)    57 (32)           88 (3,644)   104 (740)
    K = 64, b = 64                46 (844)   73 (116)          116 (5,220)   120 (1,592)
    K = 96, b = 16              58 (2,332)   57 (344)          136 (9,232)   108 (1,744)
    K = 96, b = 64              66 (2,532)   69 (516)         172 (11,160)   120 (2,680)

and one_token 2 to 4. K = 96 is padded to 128. Products of float32 inputs are three TF32 products
each, of bfloat16 inputs one (`precision`).
"""

import jax.numpy as jnp

from pallas_kernels.ttt_common import triton_gpu
from pallas_kernels.ttt_common.triton_gpu import Stacked, padded, precision, result, run, spread

KERNELS = "pallas_kernels.ttt_mlp.triton_kernels"


def unsupported(K, b, F, dtype):
    """Why the kernels cannot run here with these sizes, or None. Any b and F will do."""
    del b, F
    return triton_gpu.unsupported(K, dtype)


def forward(q, k, v, lr, pos_scale, weights, gamma, beta, *, eps, every):
    """Whole mini-batches: q, k, v (B, H, n b, K), weights w1, b1, w2, b2 (B, H, ...).

    Returns the outputs, the last weights, and those at the start of every `every`-th mini-batch.
    """
    B, H, T, K = q.shape
    b, F = pos_scale.size, weights[1].shape[-1]
    n = T // b
    groups = -(-n // every)
    rows = (spread(x, B, H) for x in (gamma, beta))
    shapes = [x.shape[2:] for x in weights]
    # The sums of w1, b1 and w2 within a mini-batch of several chunks.
    sums = [result(*s) for s in shapes[:3]] if b > 16 else [result(1)] * 3
    out, *rest = run(
        f"{KERNELS}:forward_kernel",
        [q, k, v, lr, spread(pos_scale, B, H), *weights, *rows],
        [
            result(T, K, dtype=q.dtype),
            *(result(*s) for s in shapes),
            *(Stacked(result(groups, *s)) for s in shapes),
            *sums,
        ],
        scalars=(n, -(-F // shard(K))),
        EVERY=every,
        EPS=eps,
        **_sizes(q, pos_scale, weights[1]),
    )
    return out, tuple(rest[:4]), tuple(rest[4:8])


def backward(q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights, *, eps, every):
    """The cotangents of q, k, v, lr, pos_scale, the first weights, gamma and beta."""
    B, H, T, K = q.shape
    b, F = pos_scale.size, d_weights[1].shape[-1]
    n = T // b
    rows = (spread(x, B, H) for x in (gamma, beta))
    starts = (Stacked(x) for x in starts)
    tokens, row = result(T, K, dtype=q.dtype), result(K)
    sizes = _sizes(q, pos_scale, d_weights[1])
    chunks = sizes["CHUNKS"]
    slots = 1 if chunks == 1 else chunks + 1
    places, kept = every * slots + 1, every * chunks
    sums = [result(K, F), result(F), result(F, K)] if chunks > 1 else [result(1)] * 3
    dq, dk, dv, dlr, dpos, dw1, db1, dw2, db2, dgamma, dbeta, *_ = run(
        f"{KERNELS}:backward_kernel",
        [q, k, v, lr, spread(pos_scale, B, H), *starts, *rows, d_out, *d_weights],
        [
            *(tokens, tokens, tokens, result(T), result(b)),
            *(result(K, F), result(F), result(F, K), row, row, row),
            # The weights of a group's mini-batches, z2, zb2, A2 of each chunk, half of dz1, and
            # the cotangents of the sums.
            *(result(places, K, F), result(places, F), result(places, F, K), result(places, K)),
            *(result(kept, 16, K), result(kept, 16, K), result(kept, 16, 16), result(16, F)),
            *sums,
        ],
        scalars=(n, -(-F // shard(K))),
        EVERY=every,
        EPS=eps,
        PARTS=1 << (chunks - 1).bit_length(),
        SLOTS=slots,
        **sizes,
    )
    sums = jnp.sum(dpos, (0, 1)), jnp.sum(dgamma, 0), jnp.sum(dbeta, 0)
    return dq, dk, dv, dlr, sums[0], (dw1, db1, dw2, db2), *sums[1:]


def one_token(q, k, v, lr, scale, last, state, gamma, beta, *, eps):
    """The decode step: q, k, v (B, H, K), lr (B, H), scale and last (B,). The state is written in
    place where the caller donates it."""
    K, F, FS = q.shape[-1], state.b1.shape[-1], 64
    return triton_gpu.one_token(
        f"{KERNELS}:one_token_kernel", q, k, v, lr, scale, last, state, gamma, beta,
        scalars=(-(-F // FS),), EPS=eps, K=K, KP=padded(K), F=F, FS=FS,
    )  # fmt: skip


def shard(K):
    """How much of the hidden width is in the multiprocessor at a time."""
    return 64 if K <= 64 else 32


def _sizes(q, pos_scale, b1):
    K, b = q.shape[-1], pos_scale.size
    return {
        "PRECISION": precision(q.dtype),
        "B": b,
        "BP": 16,
        "CHUNKS": -(-b // 16),
        "K": K,
        "KP": padded(K),
        "F": b1.shape[-1],
        "FS": shard(K),
        "warps": 8,
        "stages": 1,
    }
