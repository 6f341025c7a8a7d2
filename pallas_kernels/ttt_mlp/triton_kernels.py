# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The device code of `triton_gpu.py`. Imports triton.

One program per sequence and head, the N of them in order; the letters are those of `xla.py`. The
hidden width F goes in pieces of FS: FS columns of w1 and b1 with as many rows of w2. Weights
live in global memory, of which the L2 cache holds what is in use, and pass through the SM shard by
shard; programs never touch each other's. `tl.debug_barrier` stands where threads of a program read
what others of it have written.
"""

import triton
import triton.language as tl

from pallas_kernels.ttt_common.triton_kernels import (
    add_product,
    inner_gradient_backward,
    input_gradient,
    load_row,
    load_tile,
    lower,
    normalise,
    product,
    store_row,
    store_tile,
)


@triton.jit
def gelu(x):
    """The tanh approximation, x sigmoid(2 c (x + a x^3)), and that sigmoid."""
    s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    return x * s, s


@triton.jit
def gelu_slope(x, s):
    """The derivative of gelu; s as `gelu` returns it."""
    return s + 2.0 * x * s * (1.0 - s) * (0.7978845608028654 + 0.10703222440890037 * x * x)


@triton.jit
def gelu_curve(x, s):
    """The second derivative."""
    y = 0.10703222440890037 * x * x  # 3 a c x^2
    slope = 0.7978845608028654 + y
    return 4.0 * s * (1.0 - s) * (slope + y - x * (2.0 * s - 1.0) * slope * slope)


@triton.jit
def load_shard(
    w1_, b1_, w2_, shard, K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr
):
    at, left = shard * FS, F - shard * FS
    WHOLE: tl.constexpr = K == KP and F % FS == 0
    w1 = load_tile(w1_ + at, F, K, left, KP, FS, WHOLE)
    w2 = load_tile(w2_ + at * K, K, left, K, FS, KP, WHOLE)
    return w1, load_row(b1_ + at, left, FS), w2


@triton.jit
def load_sums(
    s1_, sb1_, s2_, shard, chunk,
    K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
):  # fmt: skip
    """The sums before a chunk: before the first one, zero."""
    at = shard * FS
    left = tl.where(chunk > 0, F - at, 0)
    s1 = load_tile(s1_ + at, F, K, left, KP, FS)
    s2 = load_tile(s2_ + at * K, K, left, K, FS, KP)
    return s1, load_row(sb1_ + at, left, FS), s2


@triton.jit
def store_shard(
    w1_, b1_, w2_, shard, w1, b1, w2,
    K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
):  # fmt: skip
    at, left = shard * FS, F - shard * FS
    WHOLE: tl.constexpr = K == KP and F % FS == 0
    store_tile(w1_ + at, F, w1, K, left, KP, FS, WHOLE)
    store_tile(w2_ + at * K, K, w2, left, K, FS, KP, WHOLE)
    store_row(b1_ + at, b1, left, FS)


@triton.jit
def copy(
    shards, w1_, b1_, w2_, to_w1_, to_b1_, to_w2_,
    K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
):  # fmt: skip
    for shard in tl.range(0, shards, disable_licm=True):
        w1, b1, w2 = load_shard(w1_, b1_, w2_, shard, K, KP, F, FS)
        store_shard(to_w1_, to_b1_, to_w2_, shard, w1, b1, w2, K, KP, F, FS)


@triton.jit
def outer_gradient(k, v, z2, gamma, beta, EPS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """LN of the inner prediction and 1 / sigma; R, H and the gradient G2."""
    x_hat, inverse = normalise(z2, EPS, K, KP)
    r = gamma * x_hat + beta - v + k
    h = gamma * r
    return x_hat, inverse, r, h, input_gradient(h, x_hat, inverse, K, KP)


@triton.jit
def one_chunk(
    q, k, v, lr, pos, t_last, shards, chunk, w1_, b1_, w2_, b2, s1_, sb1_, s2_, sb2,
    to_w1_, to_b1_, to_w2_, to_s1_, to_sb1_, to_s2_, gamma, beta,
    EPS: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr, CHUNKS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
):  # fmt: skip
    """Reads the weights at one place; the last chunk writes the next ones to another (or the same).

    s1_, sb1_, s2_ and to_s1_, ... are the sums before and after the chunk, where there are several.
    Returns z2, zb2, A2 = mask(1 + Xb X2^T) and the sum of b2.
    """
    z2 = tl.zeros((BP, KP), tl.float32) + b2[None, :]
    for shard in tl.range(0, shards, disable_licm=True):
        w1, b1, w2 = load_shard(w1_, b1_, w2_, shard, K, KP, F, FS)
        x2, _s = gelu(product(k, w1, PRECISION) + b1[None, :])
        z2 = add_product(z2, x2, w2, PRECISION)
    _x_hat, _inverse, _r, _h, g2 = outer_gradient(k, v, z2, gamma, beta, EPS, K, KP)
    e = pos[:, None] * lr[None, :]
    p1 = e * lower(1.0 + product(q, tl.trans(k), PRECISION), BP)
    step2 = lr[:, None] * g2
    zb2 = tl.zeros((BP, KP), tl.float32) + b2[None, :]
    gathered2 = tl.zeros((BP, KP), tl.float32) + sb2[None, :]
    a2 = tl.zeros((BP, BP), tl.float32)
    tl.debug_barrier()
    for shard in tl.range(0, shards, disable_licm=True):
        w1, b1, w2 = load_shard(w1_, b1_, w2_, shard, K, KP, F, FS)
        z1 = product(k, w1, PRECISION) + b1[None, :]
        x2, s = gelu(z1)
        g1 = product(g2, tl.trans(w2), PRECISION) * gelu_slope(z1, s)
        zb1 = product(q, w1, PRECISION) - product(p1, g1, PRECISION) + b1[None, :]
        step1 = lr[:, None] * g1
        d1 = product(tl.trans(k), step1, PRECISION)
        d2 = product(tl.trans(x2), step2, PRECISION)
        db1 = tl.sum(step1, 0)
        if CHUNKS > 1:
            s1, sb1, s2 = load_sums(s1_, sb1_, s2_, shard, chunk, K, KP, F, FS)
            zb1 -= pos[:, None] * (product(q, s1, PRECISION) + sb1[None, :])
            d1 += s1
            d2 += s2
            db1 += sb1
        xb, _sb = gelu(zb1)
        zb2 = add_product(zb2, xb, w2, PRECISION)
        if shards > 0:  # a region of its own: otherwise its (b, b) layout takes over the others
            a2 = add_product(a2, xb, tl.trans(x2), PRECISION)
        if CHUNKS > 1:
            gathered2 = add_product(gathered2, xb, s2, PRECISION)
            store_shard(to_s1_, to_sb1_, to_s2_, shard, d1, db1, d2, K, KP, F, FS)
            if chunk == CHUNKS - 1:
                w1 -= t_last * d1
                b1 -= t_last * db1
                w2 -= t_last * d2
                store_shard(to_w1_, to_b1_, to_w2_, shard, w1, b1, w2, K, KP, F, FS)
        else:
            w1 -= t_last * d1
            b1 -= t_last * db1
            w2 -= t_last * d2
            store_shard(to_w1_, to_b1_, to_w2_, shard, w1, b1, w2, K, KP, F, FS)
    tl.debug_barrier()
    a2 = lower(1.0 + a2, BP)
    zb2 -= product(e * a2, g2, PRECISION)
    if CHUNKS > 1:
        zb2 -= pos[:, None] * gathered2
    return z2, zb2, a2, sb2 + tl.sum(step2, 0)


@triton.jit
def forward_kernel(
    q_, k_, v_, lr_, pos_, w1_, b1_, w2_, b2_, gamma_, beta_, n, shards,
    out_, w1_last_, b1_last_, w2_last_, b2_last_, w1_starts_, b1_starts_, w2_starts_, b2_starts_,
    s1_, sb1_, s2_,
    EVERY: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    B: tl.constexpr, BP: tl.constexpr, CHUNKS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    TILE: tl.constexpr = B % BP == 0 and K == KP
    tokens = program * n * B
    pos_ += program * B
    t_last = tl.load(pos_ + B - 1)
    gamma = load_row(gamma_ + program * K, K, KP)[None, :]
    beta = load_row(beta_ + program * K, K, KP)[None, :]
    b2 = load_row(b2_ + program * K, K, KP)
    w1_ += program * K * F
    b1_ += program * F
    w2_ += program * F * K
    w1_last_ += program * K * F
    b1_last_ += program * F
    w2_last_ += program * F * K
    if CHUNKS > 1:
        s1_ += program * K * F
        sb1_ += program * F
        s2_ += program * F * K
    copy(shards, w1_, b1_, w2_, w1_last_, b1_last_, w2_last_, K, KP, F, FS)
    tl.debug_barrier()
    for group in range(tl.cdiv(n, EVERY)):
        place = group * programs + program
        copy(
            shards,
            w1_last_, b1_last_, w2_last_,
            w1_starts_ + place * K * F, b1_starts_ + place * F, w2_starts_ + place * F * K,
            K, KP, F, FS,
        )  # fmt: skip
        store_row(b2_starts_ + place * K, b2, K, KP)
        for i in range(group * EVERY, min(n, group * EVERY + EVERY)):
            sb2 = tl.zeros((KP,), tl.float32)
            for chunk in range(CHUNKS):
                left = B - chunk * BP
                at = tokens + i * B + chunk * BP
                k = load_tile(k_ + at * K, K, left, K, BP, KP, TILE)
                v = load_tile(v_ + at * K, K, left, K, BP, KP, TILE)
                q = load_tile(q_ + at * K, K, left, K, BP, KP, TILE)
                lr = load_row(lr_ + at, left, BP)
                pos = load_row(pos_ + chunk * BP, left, BP)
                _z2, zb2, _a2, sb2 = one_chunk(
                    q, k, v, lr, pos, t_last, shards, chunk,
                    w1_last_, b1_last_, w2_last_, b2, s1_, sb1_, s2_, sb2,
                    w1_last_, b1_last_, w2_last_, s1_, sb1_, s2_,
                    gamma, beta, EPS, PRECISION, BP, CHUNKS, K, KP, F, FS,
                )  # fmt: skip
                y_hat, _ = normalise(zb2, EPS, K, KP)
                store_tile(out_ + at * K, K, q + gamma * y_hat + beta, left, K, BP, KP, TILE)
            b2 -= t_last * sb2
    store_row(b2_last_ + program * K, b2, K, KP)


@triton.jit
def backward_kernel(
    q_, k_, v_, lr_, pos_, w1_starts_, b1_starts_, w2_starts_, b2_starts_, gamma_, beta_,
    d_out_, dw1_last_, db1_last_, dw2_last_, db2_last_, n, shards,
    dq_, dk_, dv_, dlr_, dpos_, dw1_, db1_, dw2_, db2_, dgamma_, dbeta_,
    w1_, b1_, w2_, sb2_, z2_, zb2_, a2_, u_, ds1_, dsb1_, ds2_,
    EVERY: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    B: tl.constexpr, BP: tl.constexpr, CHUNKS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The scratch of a group has SLOTS places per mini-batch: its weights; where it has several
    chunks, then the sums after each of them. PARTS is CHUNKS, padded."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    TILE: tl.constexpr = B % BP == 0 and K == KP
    HIDDEN: tl.constexpr = F % FS == 0
    tokens = program * n * B
    w1_ += program * (EVERY * SLOTS + 1) * K * F
    b1_ += program * (EVERY * SLOTS + 1) * F
    w2_ += program * (EVERY * SLOTS + 1) * F * K
    sb2_ += program * (EVERY * SLOTS + 1) * K
    z2_ += program * EVERY * CHUNKS * BP * K
    zb2_ += program * EVERY * CHUNKS * BP * K
    a2_ += program * EVERY * CHUNKS * BP * BP
    u_ += program * BP * F
    dw1_ += program * K * F
    db1_ += program * F
    dw2_ += program * F * K
    if CHUNKS > 1:
        ds1_ += program * K * F
        dsb1_ += program * F
        ds2_ += program * F * K
    else:
        ds1_ = dw1_
        dsb1_ = db1_
        ds2_ = dw2_
    pos_ += program * B
    t_last = tl.load(pos_ + B - 1)
    gamma = load_row(gamma_ + program * K, K, KP)[None, :]
    beta = load_row(beta_ + program * K, K, KP)[None, :]
    copy(
        shards,
        dw1_last_ + program * K * F, db1_last_ + program * F, dw2_last_ + program * F * K,
        dw1_, db1_, dw2_, K, KP, F, FS,
    )  # fmt: skip
    db2 = load_row(db2_last_ + program * K, K, KP)
    part = tl.arange(0, PARTS)[:, None]
    place_in_batch = part * BP + tl.arange(0, BP)[None, :]
    dpos = tl.zeros((PARTS, BP), tl.float32)
    dt_last = tl.sum(tl.zeros((BP,), tl.float32), 0)
    dgamma = tl.zeros((BP, KP), tl.float32)
    dbeta = tl.zeros((BP, KP), tl.float32)
    groups = tl.cdiv(n, EVERY)
    for reverse in range(groups):
        group = groups - 1 - reverse
        first = group * EVERY
        members = min(EVERY, n - first)
        place = group * programs + program
        tl.debug_barrier()
        copy(
            shards,
            w1_starts_ + place * K * F, b1_starts_ + place * F, w2_starts_ + place * F * K,
            w1_, b1_, w2_, K, KP, F, FS,
        )  # fmt: skip
        b2 = load_row(b2_starts_ + place * K, K, KP)
        tl.debug_barrier()
        for member in range(members):
            slot = member * SLOTS
            then = slot + SLOTS
            sb2 = tl.zeros((KP,), tl.float32)
            for chunk in range(CHUNKS):
                left = B - chunk * BP
                at = tokens + (first + member) * B + chunk * BP
                k = load_tile(k_ + at * K, K, left, K, BP, KP, TILE)
                v = load_tile(v_ + at * K, K, left, K, BP, KP, TILE)
                q = load_tile(q_ + at * K, K, left, K, BP, KP, TILE)
                lr = load_row(lr_ + at, left, BP)
                pos = load_row(pos_ + chunk * BP, left, BP)
                sums, after = slot + chunk, slot + chunk + 1
                store_row(sb2_ + sums * K, sb2, K, KP)
                z2, zb2, a2, sb2 = one_chunk(
                    q, k, v, lr, pos, t_last, shards, chunk,
                    w1_ + slot * K * F, b1_ + slot * F, w2_ + slot * F * K, b2,
                    w1_ + sums * K * F, b1_ + sums * F, w2_ + sums * F * K, sb2,
                    w1_ + then * K * F, b1_ + then * F, w2_ + then * F * K,
                    w1_ + after * K * F, b1_ + after * F, w2_ + after * F * K,
                    gamma, beta, EPS, PRECISION, BP, CHUNKS, K, KP, F, FS,
                )  # fmt: skip
                kept = member * CHUNKS + chunk
                store_tile(z2_ + kept * BP * K, K, z2, BP, K, BP, KP, K == KP)
                store_tile(zb2_ + kept * BP * K, K, zb2, BP, K, BP, KP, K == KP)
                store_tile(a2_ + kept * BP * BP, BP, a2, BP, BP, BP, BP, True)
            store_row(sb2_ + (slot + CHUNKS) * K, sb2, K, KP)
            b2 -= t_last * sb2
        tl.debug_barrier()
        for back in range(members):
            member = members - 1 - back
            slot = member * SLOTS
            w1_now, b1_now, w2_now = w1_ + slot * K * F, b1_ + slot * F, w2_ + slot * F * K
            # The cotangent of the sums is `scale` times (ds1, dsb1, ds2, dsb2).
            if CHUNKS > 1:
                total = slot + CHUNKS
                for shard in tl.range(0, shards, disable_licm=True):
                    dw1, dv1, dw2 = load_shard(dw1_, db1_, dw2_, shard, K, KP, F, FS)
                    s1, sb1, s2 = load_shard(
                        w1_ + total * K * F, b1_ + total * F, w2_ + total * F * K,
                        shard, K, KP, F, FS,
                    )  # fmt: skip
                    dt_last -= tl.sum(tl.sum(s1 * dw1, 1), 0) + tl.sum(sb1 * dv1, 0)
                    dt_last -= tl.sum(tl.sum(s2 * dw2, 1), 0)
                    store_shard(
                        ds1_, dsb1_, ds2_, shard, -t_last * dw1, -t_last * dv1, -t_last * dw2,
                        K, KP, F, FS,
                    )  # fmt: skip
                dt_last -= tl.sum(load_row(sb2_ + total * K, K, KP) * db2, 0)
                dsb2 = -t_last * db2
                scale = 1.0
                tl.debug_barrier()
            else:
                dsb2 = db2
                scale = -t_last
            for behind in range(CHUNKS):
                chunk = CHUNKS - 1 - behind
                left = B - chunk * BP
                at = tokens + (first + member) * B + chunk * BP
                kept = member * CHUNKS + chunk
                sums = slot + chunk
                k = load_tile(k_ + at * K, K, left, K, BP, KP, TILE)
                v = load_tile(v_ + at * K, K, left, K, BP, KP, TILE)
                q = load_tile(q_ + at * K, K, left, K, BP, KP, TILE)
                do = load_tile(d_out_ + at * K, K, left, K, BP, KP, TILE)
                lr = load_row(lr_ + at, left, BP)
                pos = load_row(pos_ + chunk * BP, left, BP)
                z2 = load_tile(z2_ + kept * BP * K, K, BP, K, BP, KP, K == KP)
                zb2 = load_tile(zb2_ + kept * BP * K, K, BP, K, BP, KP, K == KP)
                a2 = load_tile(a2_ + kept * BP * BP, BP, BP, BP, BP, BP, True)
                x_hat, inverse, r, h, g2 = outer_gradient(k, v, z2, gamma, beta, EPS, K, KP)
                y_hat, y_inverse = normalise(zb2, EPS, K, KP)
                rate = (scale * lr)[:, None]
                e = pos[:, None] * lr[None, :]
                a1 = lower(1.0 + product(q, tl.trans(k), PRECISION), BP)
                p1 = e * a1

                # Through the readings, and through the step to the next state.
                dzb2 = input_gradient(gamma * do, y_hat, y_inverse, K, KP)
                dgamma += do * y_hat
                dbeta += do
                dp2 = -lower(product(dzb2, tl.trans(g2), PRECISION), BP)
                de, da2 = dp2 * a2, dp2 * e
                dg2 = -product(tl.trans(e * a2), dzb2, PRECISION)
                m2 = tl.zeros((BP, KP), tl.float32) + dsb2[None, :]
                dp1 = tl.zeros((BP, BP), tl.float32)
                mg = tl.zeros((BP,), tl.float32)
                dpos_part = tl.zeros((BP,), tl.float32)
                dq = do
                dk = tl.zeros((BP, KP), tl.float32)
                for shard in tl.range(0, shards, disable_licm=True):
                    w1, b1, w2 = load_shard(w1_now, b1_now, w2_now, shard, K, KP, F, FS)
                    ds1, dsb1, ds2 = load_shard(ds1_, dsb1_, ds2_, shard, K, KP, F, FS)
                    z1 = product(k, w1, PRECISION) + b1[None, :]
                    x2, s = gelu(z1)
                    slope = gelu_slope(z1, s)
                    t = product(g2, tl.trans(w2), PRECISION)
                    g1 = t * slope
                    zb1 = product(q, w1, PRECISION) - product(p1, g1, PRECISION) + b1[None, :]
                    dxb = product(dzb2, tl.trans(w2), PRECISION) + product(da2, x2, PRECISION)
                    if CHUNKS > 1:
                        s1, sb1, s2 = load_sums(
                            w1_ + sums * K * F, b1_ + sums * F, w2_ + sums * F * K,
                            shard, chunk, K, KP, F, FS,
                        )  # fmt: skip
                        gathered = product(q, s1, PRECISION) + sb1[None, :]
                        zb1 -= pos[:, None] * gathered
                        back2 = product(dzb2, tl.trans(s2), PRECISION)
                        dxb -= pos[:, None] * back2
                    xb, sb = gelu(zb1)
                    dzb1 = dxb * gelu_slope(zb1, sb)
                    dx2 = product(tl.trans(da2), xb, PRECISION)
                    dx2 += rate * product(g2, tl.trans(ds2), PRECISION)
                    m2 = add_product(m2, x2, ds2, PRECISION)
                    dq = add_product(dq, dzb1, tl.trans(w1), PRECISION)
                    if shards > 0:  # as in `one_chunk`
                        dp1 = add_product(dp1, dzb1, tl.trans(g1), PRECISION)
                    m1 = product(k, ds1, PRECISION) + dsb1[None, :]
                    mg += tl.sum(m1 * g1, 1)
                    dg1 = rate * m1 - product(tl.trans(p1), dzb1, PRECISION)
                    dk = add_product(dk, rate * g1, tl.trans(ds1), PRECISION)
                    dt = dg1 * slope
                    dg2 = add_product(dg2, dt, w2, PRECISION)
                    if CHUNKS > 1:
                        scaled1 = pos[:, None] * dzb1
                        dq = add_product(dq, -scaled1, tl.trans(s1), PRECISION)
                        dpos_part -= tl.sum(dzb1 * gathered, 1) + tl.sum(xb * back2, 1)
                        ds1 -= product(tl.trans(q), scaled1, PRECISION)
                        dsb1 -= tl.sum(scaled1, 0)
                        ds2 -= product(tl.trans(xb), pos[:, None] * dzb2, PRECISION)
                        store_shard(ds1_, dsb1_, ds2_, shard, ds1, dsb1, ds2, K, KP, F, FS)
                        dw1, dv1, dw2 = load_shard(dw1_, db1_, dw2_, shard, K, KP, F, FS)
                    else:
                        dw1, dv1, dw2 = ds1, dsb1, ds2
                    dw2 = add_product(dw2, tl.trans(xb), dzb2, PRECISION)
                    dw2 = add_product(dw2, tl.trans(dt), g2, PRECISION)
                    dw1 = add_product(dw1, tl.trans(q), dzb1, PRECISION)
                    dv1 += tl.sum(dzb1, 0)
                    store_shard(dw1_, db1_, dw2_, shard, dw1, dv1, dw2, K, KP, F, FS)
                    u = dg1 * t * gelu_curve(z1, s) + dx2 * slope
                    store_tile(u_ + shard * FS, F, u, BP, F - shard * FS, BP, FS, HIDDEN)
                dp1 = -lower(dp1, BP)
                de += dp1 * a1
                da1 = dp1 * e
                dq = add_product(dq, da1, k, PRECISION)
                dk = add_product(dk, tl.trans(da1), q, PRECISION)
                mg += tl.sum(m2 * g2, 1)
                dg2 += rate * m2
                dpos_part += tl.sum(de * lr[None, :], 1)
                if CHUNKS > 1:
                    sb2 = load_row(sb2_ + sums * K, K, KP)
                    dpos_part -= tl.sum(dzb2 * sb2[None, :], 1)
                    dsb2 -= tl.sum(pos[:, None] * dzb2, 0)
                else:
                    dt_last -= tl.sum(mg * lr, 0)

                dz2, dr, dgamma_part = inner_gradient_backward(
                    dg2, g2, h, r, x_hat, inverse, gamma, K, KP
                )
                dgamma += dgamma_part
                dbeta += dr
                dk += dr
                tl.debug_barrier()
                for shard in tl.range(0, shards, disable_licm=True):
                    w1, b1, w2 = load_shard(w1_now, b1_now, w2_now, shard, K, KP, F, FS)
                    dw1, dv1, dw2 = load_shard(dw1_, db1_, dw2_, shard, K, KP, F, FS)
                    u = load_tile(u_ + shard * FS, F, BP, F - shard * FS, BP, FS, HIDDEN)
                    z1 = product(k, w1, PRECISION) + b1[None, :]
                    x2, s = gelu(z1)
                    dz1 = u + product(dz2, tl.trans(w2), PRECISION) * gelu_slope(z1, s)
                    dk = add_product(dk, dz1, tl.trans(w1), PRECISION)
                    dw2 = add_product(dw2, tl.trans(x2), dz2, PRECISION)
                    dw1 = add_product(dw1, tl.trans(k), dz1, PRECISION)
                    dv1 += tl.sum(dz1, 0)
                    store_shard(dw1_, db1_, dw2_, shard, dw1, dv1, dw2, K, KP, F, FS)
                tl.debug_barrier()
                db2 += tl.sum(dzb2 + dz2, 0)
                store_tile(dq_ + at * K, K, dq, left, K, BP, KP, TILE)
                store_tile(dk_ + at * K, K, dk, left, K, BP, KP, TILE)
                store_tile(dv_ + at * K, K, -dr, left, K, BP, KP, TILE)
                store_row(dlr_ + at, tl.sum(pos[:, None] * de, 0) + scale * mg, left, BP)
                dpos += tl.where(part == chunk, dpos_part[None, :], 0.0)
    store_row(db2_ + program * K, db2, K, KP)
    dpos += tl.where(place_in_batch == B - 1, dt_last, 0.0)
    tl.store(dpos_ + program * B + place_in_batch, dpos, mask=place_in_batch < B)
    store_row(dgamma_ + program * K, tl.sum(dgamma, 0), K, KP)
    store_row(dbeta_ + program * K, tl.sum(dbeta, 0), K, KP)


@triton.jit
def one_token_kernel(
    q_, k_, v_, lr_, scale_, last_,
    w1_, b1_, w2_, b2_, w1_sum_, b1_sum_, w2_sum_, b2_sum_, gamma_, beta_, shards,
    out_, w1_out_, b1_out_, w2_out_, b2_out_,
    w1_sum_out_, b1_sum_out_, w2_sum_out_, b2_sum_out_,
    EPS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, F: tl.constexpr, FS: tl.constexpr,
):  # fmt: skip
    """The outputs of the state are its inputs: weights that stay are not written."""
    program = tl.program_id(0).to(tl.int64)
    rows, hidden, weight = program * K, program * F, program * K * F
    k = load_row(k_ + rows, K, KP)
    q = load_row(q_ + rows, K, KP)
    v = load_row(v_ + rows, K, KP)[None, :]
    gamma = load_row(gamma_ + rows, K, KP)[None, :]
    beta = load_row(beta_ + rows, K, KP)[None, :]
    b2 = load_row(b2_ + rows, K, KP)[None, :]
    lr, scale = tl.load(lr_ + program), tl.load(scale_ + program)
    last = tl.load(last_ + program) != 0

    z2 = b2
    for shard in tl.range(0, shards):
        w1, b1, w2 = load_shard(w1_ + weight, b1_ + hidden, w2_ + weight, shard, K, KP, F, FS)
        x2, s = gelu(tl.sum(k[:, None] * w1, 0) + b1)
        z2 += tl.sum(x2[:, None] * w2, 0)[None, :]
    _x_hat, _inverse, _r, _h, g2 = outer_gradient(k[None, :], v, z2, gamma, beta, EPS, K, KP)
    g2_lr = lr * g2
    b2_sum = load_row(b2_sum_ + rows, K, KP)[None, :] + g2_lr
    b2 -= scale * b2_sum

    zb2 = b2
    for shard in tl.range(0, shards):
        w1, b1, w2 = load_shard(w1_ + weight, b1_ + hidden, w2_ + weight, shard, K, KP, F, FS)
        w1_sum, b1_sum, w2_sum = load_shard(
            w1_sum_ + weight, b1_sum_ + hidden, w2_sum_ + weight, shard, K, KP, F, FS
        )
        z1 = tl.sum(k[:, None] * w1, 0) + b1
        x2, s = gelu(z1)
        g1 = lr * tl.sum(w2 * g2, 1) * gelu_slope(z1, s)
        w1_sum += k[:, None] * g1[None, :]
        b1_sum += g1
        w2_sum += x2[:, None] * g2_lr
        w1 -= scale * w1_sum
        b1 -= scale * b1_sum
        w2 -= scale * w2_sum
        xb, s = gelu(tl.sum(q[:, None] * w1, 0) + b1)
        zb2 += tl.sum(xb[:, None] * w2, 0)[None, :]
        store_shard(
            w1_sum_out_ + weight, b1_sum_out_ + hidden, w2_sum_out_ + weight, shard,
            tl.where(last, 0.0, w1_sum), tl.where(last, 0.0, b1_sum), tl.where(last, 0.0, w2_sum),
            K, KP, F, FS,
        )  # fmt: skip
        if last:
            store_shard(
                w1_out_ + weight, b1_out_ + hidden, w2_out_ + weight, shard, w1, b1, w2,
                K, KP, F, FS,
            )  # fmt: skip
    y_hat, _inverse = normalise(zb2, EPS, K, KP)
    store_tile(out_ + rows, K, q[None, :] + gamma * y_hat + beta, 1, K, 1, KP)
    store_tile(b2_sum_out_ + rows, K, tl.where(last, 0.0, b2_sum), 1, K, 1, KP)
    if last:
        store_tile(b2_out_ + rows, K, b2, 1, K, 1, KP)
