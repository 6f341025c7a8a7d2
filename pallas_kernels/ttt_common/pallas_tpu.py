# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The TPU kernels of both TTT operations, around the arithmetic of one mini-batch that each brings.

Several heads stand side by side in the lanes, two for K = 64, those of all sequences in one row: a
*pack*. (A head of K = 96 stands alone, in three quarters of the lanes; where B H is odd, all do.)
Weights of a pack are stored compact, [K, heads columns], and worked with block-diagonal,
[heads K, heads columns]: one product of all tokens with such a weight serves every head, and costs
a matrix unit of 128 x 128 no more than the heads' own products, which would leave it half empty.
Products of tokens with tokens take one factor stacked: [heads b, lanes], where the rows of head h
are zero outside the lanes of head h.

Grid: (blocks of packs, time), time in order. The weights stay in VMEM, float32, from the first
mini-batch to the last; tokens come and go in double-buffered tiles of up to `checkpoint_every`
mini-batches. The packs of a block are independent, so that one's products hide another's latency.

The backward kernel walks the groups of `checkpoint_every` mini-batches in reverse: it reruns a
group from the stored weights into VMEM, then goes back through its mini-batches.

Precision: float32 inputs are multiplied at `Precision.HIGHEST` (six passes); for bfloat16 inputs
all factors are rounded to bfloat16, one pass, and summed in float32. Weights, norms and everything
element by element are float32 in both.

Letters: B batch, H heads, T tokens, K head width, b tokens in a mini-batch, n mini-batches,
N packs in a block, L = heads K lanes, S = heads b stacked rows, C columns of a weight (1 row for a
bias). Inside, everything is float32 and has the leading axis N.
"""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ttt_common.tpu_packs import Pack, expand, fold, normalise
from pallas_kernels.varying import match_varying

LANES = 128
VMEM_LIMIT = 48 * 2**20  # of 128 MiB (v5e, v6e) or 64 MiB (v5p)
BLOCK_BUDGET = 24 * 2**20  # what our count may reach; what the compiler adds has the rest


class Arithmetic(Protocol):
    """One mini-batch of an operation. lr (N, 1, S), pos (b, 1), gamma and beta (N, 1, L)."""

    def forward(self, q, k, v, lr, pos, weights, gamma, beta, pack):
        """The output and the next weights."""

    def advance(self, k, v, lr, pos, weights, gamma, beta, pack):
        """The next weights alone."""

    def backward(self, q, k, v, lr, pos, weights, gamma, beta, d_out, d_weights, pack):
        """Cotangents: (dq, dk, dv), dlr, (dpos (N, b, 1), dgamma, dbeta) and those of weights."""

    def gather(self, k, v, weights, gamma, beta, pack):
        """What a token adds to the sums; k and v (N, 1, K), one head in a pack."""

    def predict(self, q, weights):
        """The inner model before its last norm, (N, 1, K)."""


# Layout in memory.


def _heads_in_pack(B, H, K):
    return max(h for h in range(1, B * H + 1) if B * H % h == 0 and (h == 1 or h * K <= LANES))


def _pack_tokens(x, b, heads):
    """(B, H, T, K) to (packs, n, b, L)."""
    B, H, T, K = x.shape
    x = x.reshape(B * H // heads, heads, T // b, b, K)
    return x.transpose(0, 2, 3, 1, 4).reshape(-1, T // b, b, heads * K)


def _unpack_tokens(x, B, H, heads):
    packs, n, b, L = x.shape
    x = x.reshape(packs, n, b, heads, L // heads)
    return x.transpose(0, 3, 1, 2, 4).reshape(B, H, n * b, L // heads)


def _pack_rates(lr, b, heads, tile):
    """(B, H, T) to (packs, tiles, tile, S), zero after the last mini-batch."""
    B, H, T = lr.shape
    lr = lr.reshape(B * H // heads, heads, T // b, b).transpose(0, 2, 1, 3)
    lr = jnp.pad(lr, ((0, 0), (0, -(T // b) % tile), (0, 0), (0, 0)))
    return lr.reshape(lr.shape[0], -1, tile, heads * b)


def _unpack_rates(lr, B, H, T, heads):
    packs, tiles, tile, S = lr.shape
    lr = lr.reshape(packs, tiles * tile, heads, S // heads)[:, : T * heads // S]
    return lr.transpose(0, 2, 1, 3).reshape(B, H, T)


def _pack_weight(w, heads):
    """(..., B, H, K or 1, C) to (..., packs, K or 1, heads C)."""
    *lead, B, H, K, C = w.shape
    w = w.reshape(*lead, B * H // heads, heads, K, C)
    return jnp.swapaxes(w, -3, -2).reshape(*lead, B * H // heads, K, heads * C)


def _unpack_weight(w, B, H):
    *lead, packs, K, C = w.shape
    heads = B * H // packs
    w = jnp.swapaxes(w.reshape(*lead, packs, K, heads, C // heads), -3, -2)
    return w.reshape(*lead, B, H, K, C // heads)


def _pack_vector(x, B, heads):
    """(H, K) to (packs, 1, L)."""
    return _pack_weight(jnp.broadcast_to(x[:, None], (B, x.shape[0], 1, x.shape[1])), heads)


def _tile_bytes(shape, dtype=jnp.float32):
    """What an array takes in VMEM, its last two axes padded to whole tiles."""
    size = jnp.dtype(dtype).itemsize
    rows = -(-shape[-2] // (32 // size)) * (32 // size)
    lanes = -(-shape[-1] // LANES) * LANES
    return math.prod(shape[:-2]) * rows * lanes * size


class _Sizes(NamedTuple):
    heads: int
    packs: int
    b: int
    K: int
    columns: tuple
    """Rows and columns of each weight of one head."""
    dtype: Any

    def compact(self):
        return sum(_tile_bytes((r, self.heads * c)) for r, c in self.columns)

    def expanded(self):
        return sum(
            _tile_bytes((r if r == 1 else self.heads * r, self.heads * c)) for r, c in self.columns
        )

    def mini_batch(self, arrays):
        """Tokens of `arrays` arrays, double-buffered."""
        rates = 2 * 2 * _tile_bytes((1, self.heads * self.b)) // 8
        return 2 * arrays * _tile_bytes((self.b, self.heads * self.K), self.dtype) + rates

    def values(self, arrays):
        """A generous count of what lives between: tiles of tokens as wide as the weights."""
        wide = max(c for _, c in self.columns) * self.heads
        return arrays * _tile_bytes((self.heads * self.b, wide))


def _sizes(q, pos_scale, weights):
    B, H, _, K = q.shape
    heads = _heads_in_pack(B, H, K)
    columns = tuple(x.shape[2:] for x in weights)
    return _Sizes(heads, B * H // heads, pos_scale.shape[0], K, columns, q.dtype)


def forward_bytes(sizes, tile):
    """VMEM of the forward kernel, one pack per block."""
    weights = 6 * sizes.compact() + 2 * sizes.expanded()
    return weights + tile * sizes.mini_batch(4) + sizes.values(6)


def backward_bytes(sizes, tile):
    """VMEM of the backward kernel, one pack per block."""
    weights = (tile + 6) * sizes.compact() + 3 * sizes.expanded()
    return weights + tile * sizes.mini_batch(7) + sizes.values(16)


def _most(limit, count, fits):
    """The largest divisor of `count` up to `limit` that fits, or 1."""
    return max(x for x in range(1, min(limit, count) + 1) if count % x == 0 and (x == 1 or fits(x)))


# The kernels.


def forward(arithmetic, q, k, v, lr, pos_scale, weights, gamma, beta, *, eps, every):
    """The contract of every implementation; weights (B, H, K, C) or, for a bias, (B, H, 1, C)."""
    arrays = (q, k, v, lr, pos_scale, weights, gamma, beta)
    q, k, v, lr, pos_scale, weights, gamma, beta = match_varying(arrays)
    B, H, T, K = q.shape
    sizes = _sizes(q, pos_scale, weights)
    b, heads, packs = sizes.b, sizes.heads, sizes.packs
    n = T // b
    every = min(every, n)
    tile = _most(every, every, lambda x: forward_bytes(sizes, x) <= BLOCK_BUDGET)
    N = _most(4, packs, lambda x: x * forward_bytes(sizes, tile) <= BLOCK_BUDGET)
    tiles, per_group = pl.cdiv(n, tile), every // tile
    pack = Pack(heads, q.dtype == jnp.float32, eps)
    count = len(weights)

    def kernel(q, k, v, lr, pos, gamma, beta, *refs):
        given, out, refs = refs[:count], refs[count], refs[count + 1 :]
        last, starts, state = (refs[i * count :][:count] for i in range(3))
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            _copy(state, (expand(x[...], pack) for x in given))

        @pl.when(jax.lax.rem(step, per_group) == 0)
        def _():
            _copy(starts, (fold(x[...], ref.shape[1]) for ref, x in zip(starts, state)))

        def mini_batch(i, _):
            read, new = arithmetic.forward(
                *(x[:, i].astype(jnp.float32) for x in (q, k, v)),
                lr[:, 0, pl.ds(i, 1)],
                pos[...],
                _values(state),
                gamma[...],
                beta[...],
                pack,
            )
            out[:, i] = read.astype(out.dtype)
            _copy(state, new)

        jax.lax.fori_loop(0, jnp.minimum(tile, n - step * tile), mini_batch, None)

        @pl.when(step == tiles - 1)
        def _():
            _copy(last, (fold(x[...], ref.shape[1]) for ref, x in zip(last, state)))

    tokens = pl.BlockSpec((N, tile, b, heads * K), lambda c, t: (c, t, 0, 0))
    rates = pl.BlockSpec((N, 1, tile, heads * b), lambda c, t: (c, t, 0, 0))
    vector = pl.BlockSpec((N, 1, heads * K), lambda c, t: (c, 0, 0))
    packed = [_pack_weight(w, heads) for w in weights]
    whole = [pl.BlockSpec((N, *w.shape[1:]), lambda c, t: (c, 0, 0)) for w in packed]
    group = [
        pl.BlockSpec((None, N, *w.shape[1:]), lambda c, t: (jax.lax.div(t, per_group), c, 0, 0))
        for w in packed
    ]
    groups = pl.cdiv(n, every)
    out, *states = pl.pallas_call(
        kernel,
        grid=(packs // N, tiles),
        in_specs=[*[tokens] * 3, rates, _everything((b, 1)), vector, vector, *whole],
        out_specs=[tokens, *whole, *group],
        out_shape=[
            _like(q, (packs, n, b, heads * K), q.dtype),
            *(_like(q, w.shape) for w in packed),
            *(_like(q, (groups, *w.shape)) for w in packed),
        ],
        scratch_shapes=[_state(w, N, heads) for w in packed],
        compiler_params=_in_time(),
        name="ttt_forward",
    )(
        *(_pack_tokens(x, b, heads) for x in (q, k, v)),
        _pack_rates(lr, b, heads, tile),
        pos_scale[:, None],
        *(_pack_vector(x, B, heads) for x in (gamma, beta)),
        *packed,
    )
    states = [_unpack_weight(w, B, H) for w in states]
    return _unpack_tokens(out, B, H, heads), tuple(states[:count]), tuple(states[count:])


def backward(
    arithmetic, q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights, *, eps, every
):
    """The contract of every implementation, weights as in `forward`.

    Where the states of a whole group do not fit in VMEM, the forward kernel runs again and stores
    more of them.
    """
    arrays = (q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights)
    arrays = match_varying(arrays)
    q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights = arrays
    B, H, T, K = q.shape
    sizes = _sizes(q, pos_scale, d_weights)
    b, heads, packs = sizes.b, sizes.heads, sizes.packs
    n = T // b
    every = min(every, n)
    tile = next(x for x in range(every, 0, -1) if backward_bytes(sizes, x) <= BLOCK_BUDGET)
    if tile < every:
        first = tuple(x[0] for x in starts)
        starts = forward(
            arithmetic, q, k, v, lr, pos_scale, first, gamma, beta, eps=eps, every=tile
        )[2]
    N = _most(4, packs, lambda x: x * backward_bytes(sizes, tile) <= BLOCK_BUDGET)
    groups = pl.cdiv(n, tile)
    pack = Pack(heads, q.dtype == jnp.float32, eps)
    count = len(d_weights)

    def kernel(q, k, v, lr, pos, gamma, beta, d_out, *refs):
        starts, given, refs = refs[:count], refs[count : 2 * count], refs[2 * count :]
        dq, dk, dv, dlr, *d_shared = refs[:7]
        d_first, state, d_state, states = (refs[7 + i * count :][:count] for i in range(4))
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            _copy(d_state, (expand(x[...], pack) for x in given))
            _copy(d_shared, (jnp.zeros(x.shape, x.dtype) for x in d_shared))

        members = jnp.minimum(tile, n - (groups - 1 - step) * tile)
        _copy(state, (expand(x[...], pack) for x in starts))

        def tokens(i, *refs):
            return tuple(x[:, i].astype(jnp.float32) for x in refs)

        def rerun(i, _):
            now = _values(state)
            for ref, x in zip(states, now):
                ref[i] = fold(x, ref.shape[2])
            rates = lr[:, 0, pl.ds(i, 1)]
            new = arithmetic.advance(
                *tokens(i, k, v), rates, pos[...], now, gamma[...], beta[...], pack
            )
            _copy(state, new)

        def mini_batch(i, _):
            i = members - 1 - i
            grads, d_rates, shared, d_new = arithmetic.backward(
                *tokens(i, q, k, v),
                lr[:, 0, pl.ds(i, 1)],
                pos[...],
                tuple(expand(x[i], pack) for x in states),
                gamma[...],
                beta[...],
                *tokens(i, d_out),
                _values(d_state),
                pack,
            )
            for ref, x in zip((dq, dk, dv), grads):
                ref[:, i] = x.astype(ref.dtype)
            dlr[:, 0, pl.ds(i, 1)] = d_rates
            _copy(d_shared, (ref[...] + x for ref, x in zip(d_shared, shared)))
            _copy(d_state, d_new)

        jax.lax.fori_loop(0, members, rerun, None)
        jax.lax.fori_loop(0, members, mini_batch, None)

        @pl.when(step == groups - 1)
        def _():
            _copy(d_first, (fold(x[...], ref.shape[1]) for ref, x in zip(d_first, d_state)))

    def back(*rest):
        return lambda c, t: (c, groups - 1 - t, *rest)

    tokens = pl.BlockSpec((N, tile, b, heads * K), back(0, 0))
    rates = pl.BlockSpec((N, 1, tile, heads * b), back(0, 0))
    vector = pl.BlockSpec((N, 1, heads * K), lambda c, t: (c, 0, 0))
    position = pl.BlockSpec((N, b, 1), lambda c, t: (c, 0, 0))
    packed = [_pack_weight(w, heads) for w in d_weights]
    whole = [pl.BlockSpec((N, *w.shape[1:]), lambda c, t: (c, 0, 0)) for w in packed]
    group = [
        pl.BlockSpec((None, N, *w.shape[1:]), lambda c, t: (groups - 1 - t, c, 0, 0))
        for w in packed
    ]
    by_token = (packs, n, b, heads * K)
    dq, dk, dv, dlr, dpos, dgamma, dbeta, *d_first = pl.pallas_call(
        kernel,
        grid=(packs // N, groups),
        in_specs=[
            *[tokens] * 3,
            rates,
            _everything((b, 1)),
            vector,
            vector,
            tokens,
            *group,
            *whole,
        ],
        out_specs=[*[tokens] * 3, rates, position, vector, vector, *whole],
        out_shape=[
            *[_like(q, by_token, q.dtype)] * 3,
            _like(q, (packs, groups, tile, heads * b)),
            _like(q, (packs, b, 1)),
            *[_like(q, (packs, 1, heads * K))] * 2,
            *(_like(q, w.shape) for w in packed),
        ],
        scratch_shapes=[
            *[_state(w, N, heads) for w in packed] * 2,
            *(pltpu.VMEM((tile, N, *w.shape[1:]), jnp.float32) for w in packed),
        ],
        compiler_params=_in_time(),
        name="ttt_backward",
    )(
        *(_pack_tokens(x, b, heads) for x in (q, k, v)),
        _pack_rates(lr, b, heads, tile),
        pos_scale[:, None],
        *(_pack_vector(x, B, heads) for x in (gamma, beta)),
        _pack_tokens(d_out, b, heads),
        *(_pack_weight(w, heads) for w in starts),
        *packed,
    )
    return (
        *(_unpack_tokens(x, B, H, heads) for x in (dq, dk, dv)),
        _unpack_rates(dlr, B, H, T, heads),
        jnp.sum(dpos, (0, 2)),
        tuple(_unpack_weight(w, B, H) for w in d_first),
        *(jnp.sum(x.reshape(B, H, K), 0) for x in (dgamma, dbeta)),
    )


def one_token(arithmetic, q, k, v, lr, scale, last, state, gamma, beta, *, eps):
    """The contract of every implementation; state (B, H, rows, C), 1 row for a bias.

    The state is read once and written once, in place where the caller gives it away: per head
    16 (K^2 + K) bytes (TTT-Linear) or 16 (2 K F + F + K), and 8 to 10 FLOPs for each of its
    weights. K = 64 is padded to 128 lanes, as the caller's array is: twice the bytes where K comes
    last. Blocks of up to 16 heads, at most 12 MiB of VMEM. All products in float32 without the
    matrix unit.
    """
    arrays = (q, k, v, lr, scale, last.astype(jnp.float32), state, gamma, beta)
    q, k, v, lr, scale, last, state, gamma, beta = match_varying(arrays)
    B, H, K = q.shape
    half = len(state) // 2
    pack = Pack(1, True, eps)
    flat = [x.reshape(B * H, *x.shape[2:]) for x in state]
    size = sum(2 * 2 * _tile_bytes(x.shape[1:]) for x in flat)
    N = _most(16, B * H, lambda x: x * size <= BLOCK_BUDGET // 2)

    def kernel(q, k, v, lr, scale, last, gamma, beta, *refs):
        given, out, new = refs[: 2 * half], refs[2 * half], refs[2 * half + 1 :]
        q_, k_, v_ = (x[...].astype(jnp.float32) for x in (q, k, v))
        weights = _values(given[:half])
        more = arithmetic.gather(k_, v_, weights, gamma[...], beta[...], pack)
        total = tuple(x[...] + lr[...] * y for x, y in zip(given[half:], more))
        stepped = tuple(w - scale[...] * x for w, x in zip(weights, total))
        y_hat, _ = normalise(arithmetic.predict(q_, stepped), pack)
        out[...] = (q_ + gamma[...] * y_hat + beta[...]).astype(out.dtype)
        ends = last[...] > 0
        _copy(new[:half], (jnp.where(ends, x, w) for x, w in zip(stepped, weights)))
        _copy(new[half:], (jnp.where(ends, 0, x) for x in total))

    def by_head(x):
        """(B, H, K) or (H, K) with a row of its own per head."""
        return jnp.broadcast_to(x, (B, H, x.shape[-1])).reshape(B * H, 1, -1)

    inputs = [by_head(x) for x in (q, k, v)]
    inputs += [by_head(x[..., None]) for x in (lr, *(x[:, None] for x in (scale, last)))]
    inputs += [by_head(x) for x in (gamma, beta)]
    specs = [pl.BlockSpec((N, *x.shape[1:]), lambda c: (c, 0, 0)) for x in (*inputs, *flat)]
    out, *new = pl.pallas_call(
        kernel,
        grid=(B * H // N,),
        in_specs=specs,
        out_specs=[specs[0], *specs[len(inputs) :]],
        out_shape=[_like(q, (B * H, 1, K), q.dtype), *(_like(q, x.shape) for x in flat)],
        input_output_aliases={len(inputs) + i: 1 + i for i in range(2 * half)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="ttt_one_token",
    )(*inputs, *flat)
    return out.reshape(B, H, K), tuple(x.reshape(y.shape) for x, y in zip(new, state))


def unsupported(K, b, columns, dtype) -> str | None:
    """Why these sizes cannot run, or None; `columns` are rows and columns of each weight."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernels take float32 or bfloat16, not {jnp.dtype(dtype).name}"
    sizes = _Sizes(max(1, LANES // K), 1, b, K, columns, dtype)
    need = max(forward_bytes(sizes, 1), backward_bytes(sizes, 1))
    if need > BLOCK_BUDGET:
        return (
            f"one mini-batch of {b} tokens with K = {K} needs {need / 2**20:.0f} MiB of VMEM, the "
            f"TPU kernels use {BLOCK_BUDGET // 2**20}"
        )
    return None


def _copy(refs, values):
    for ref, x in zip(refs, list(values)):
        ref[...] = x


def _values(refs):
    return tuple(x[...] for x in refs)


def _like(q, shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(q).manual_axis_type)


def _state(packed, N, heads):
    """Scratch for a block-diagonal weight, or a bias."""
    _, rows, columns = packed.shape
    return pltpu.VMEM((N, rows if rows == 1 else heads * rows, columns), jnp.float32)


def _everything(shape):
    return pl.BlockSpec(shape, lambda c, t: (0,) * len(shape))


def _in_time():
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    )
