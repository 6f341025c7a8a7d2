# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The device code of `triton_gpu.py`. Imports triton.

One program per sequence and head, the N of them in order; the letters are those of `xla.py`.

A mini-batch goes in CHUNKS of BP tokens, which keeps the tiles small. All of them learn at the
mini-batch's start; S = sum_j l_j k_j^T g_j of the earlier chunks is read like a weight, with
factor -t_i, and the state takes its step by all of S at the end.
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
def learn(
    k, v, w, bias, gamma, beta,
    EPS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LN of the inner prediction and 1 / sigma; R, H and the inner gradients G."""
    x_hat, inverse = normalise(product(k, w, PRECISION) + bias, EPS, K, KP)
    r = gamma * x_hat + beta - v + k
    h = gamma * r
    return x_hat, inverse, r, h, input_gradient(h, x_hat, inverse, K, KP)


@triton.jit
def forward_kernel(
    q_, k_, v_, lr_, pos_, w0_, bias0_, gamma_, beta_, n,
    out_, w_last_, bias_last_, w_starts_, bias_starts_,
    EVERY: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    B: tl.constexpr, BP: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    TILE: tl.constexpr = B % BP == 0 and K == KP
    WEIGHT: tl.constexpr = K == KP
    tokens = program * n * B
    pos_ += program * B
    t_last = tl.load(pos_ + B - 1)
    gamma = load_row(gamma_ + program * K, K, KP)[None, :]
    beta = load_row(beta_ + program * K, K, KP)[None, :]
    w = load_tile(w0_ + program * K * K, K, K, K, KP, KP, WEIGHT)
    bias = load_row(bias0_ + program * K, K, KP)
    for group in range(tl.cdiv(n, EVERY)):
        place = group * programs + program
        store_tile(w_starts_ + place * K * K, K, w, K, K, KP, KP, WEIGHT)
        store_row(bias_starts_ + place * K, bias, K, KP)
        for i in range(group * EVERY, min(n, group * EVERY + EVERY)):
            s = tl.zeros((KP, KP), tl.float32)
            s_bias = tl.zeros((KP,), tl.float32)
            for chunk in range(CHUNKS):
                left = B - chunk * BP
                at = tokens + i * B + chunk * BP
                k = load_tile(k_ + at * K, K, left, K, BP, KP, TILE)
                v = load_tile(v_ + at * K, K, left, K, BP, KP, TILE)
                q = load_tile(q_ + at * K, K, left, K, BP, KP, TILE)
                lr = load_row(lr_ + at, left, BP)
                pos = load_row(pos_ + chunk * BP, left, BP)
                _, _, _, _, g = learn(k, v, w, bias[None, :], gamma, beta, EPS, K, KP, PRECISION)
                a = lower(1.0 + product(q, tl.trans(k), PRECISION), BP)
                p = pos[:, None] * lr[None, :] * a
                zb = product(q, w, PRECISION) - product(p, g, PRECISION) + bias[None, :]
                if CHUNKS > 1:
                    zb -= pos[:, None] * (product(q, s, PRECISION) + s_bias[None, :])
                y_hat, _ = normalise(zb, EPS, K, KP)
                store_tile(out_ + at * K, K, q + gamma * y_hat + beta, left, K, BP, KP, TILE)
                step = lr[:, None] * g
                s = add_product(s, tl.trans(k), step, PRECISION)
                s_bias += tl.sum(step, 0)
            w -= t_last * s
            bias -= t_last * s_bias
    store_tile(w_last_ + program * K * K, K, w, K, K, KP, KP, WEIGHT)
    store_row(bias_last_ + program * K, bias, K, KP)


@triton.jit
def backward_kernel(
    q_, k_, v_, lr_, pos_, w_starts_, bias_starts_, gamma_, beta_, d_out_, dw_last_, dbias_last_, n,
    dq_, dk_, dv_, dlr_, dpos_, dw_, dbias_, dgamma_, dbeta_, w_group_, bias_group_,
    EVERY: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    B: tl.constexpr, BP: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The scratch of a group has SLOTS places per mini-batch: its weights; where it has several
    chunks, then the sums after each of them. PARTS is CHUNKS, padded."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    TILE: tl.constexpr = B % BP == 0 and K == KP
    WEIGHT: tl.constexpr = K == KP
    tokens = program * n * B
    w_group_ += program * EVERY * SLOTS * K * K
    bias_group_ += program * EVERY * SLOTS * K
    pos_ += program * B
    t_last = tl.load(pos_ + B - 1)
    gamma = load_row(gamma_ + program * K, K, KP)[None, :]
    beta = load_row(beta_ + program * K, K, KP)[None, :]
    dw = load_tile(dw_last_ + program * K * K, K, K, K, KP, KP, WEIGHT)
    dbias = load_row(dbias_last_ + program * K, K, KP)
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
        w = load_tile(w_starts_ + place * K * K, K, K, K, KP, KP, WEIGHT)
        bias = load_row(bias_starts_ + place * K, K, KP)
        tl.debug_barrier()  # the group after this one has read its states
        for member in range(members):
            slot = member * SLOTS
            store_tile(w_group_ + slot * K * K, K, w, K, K, KP, KP, WEIGHT)
            store_row(bias_group_ + slot * K, bias, K, KP)
            s = tl.zeros((KP, KP), tl.float32)
            s_bias = tl.zeros((KP,), tl.float32)
            for chunk in range(CHUNKS):
                left = B - chunk * BP
                at = tokens + (first + member) * B + chunk * BP
                k = load_tile(k_ + at * K, K, left, K, BP, KP, TILE)
                v = load_tile(v_ + at * K, K, left, K, BP, KP, TILE)
                lr = load_row(lr_ + at, left, BP)
                _, _, _, _, g = learn(k, v, w, bias[None, :], gamma, beta, EPS, K, KP, PRECISION)
                step = lr[:, None] * g
                s = add_product(s, tl.trans(k), step, PRECISION)
                s_bias += tl.sum(step, 0)
                if CHUNKS > 1:
                    after = slot + chunk + 1
                    store_tile(w_group_ + after * K * K, K, s, K, K, KP, KP, WEIGHT)
                    store_row(bias_group_ + after * K, s_bias, K, KP)
            w -= t_last * s
            bias -= t_last * s_bias
        tl.debug_barrier()  # the states are written
        for back in range(members):
            slot = (members - 1 - back) * SLOTS
            start = tokens + (first + members - 1 - back) * B
            w = load_tile(w_group_ + slot * K * K, K, K, K, KP, KP, WEIGHT)
            bias = load_row(bias_group_ + slot * K, K, KP)
            # The cotangent of the sums is `rate` times (ds, ds_bias).
            if CHUNKS > 1:
                s = load_tile(w_group_ + (slot + CHUNKS) * K * K, K, K, K, KP, KP, WEIGHT)
                s_bias = load_row(bias_group_ + (slot + CHUNKS) * K, K, KP)
                dt_last -= tl.sum(tl.sum(s * dw, 1), 0) + tl.sum(s_bias * dbias, 0)
                ds = -t_last * dw
                ds_bias = -t_last * dbias
                rate = 1.0
            else:
                ds = dw
                ds_bias = dbias
                rate = -t_last
            for behind in range(CHUNKS):
                chunk = CHUNKS - 1 - behind
                left = B - chunk * BP
                at = start + chunk * BP
                k = load_tile(k_ + at * K, K, left, K, BP, KP, TILE)
                v = load_tile(v_ + at * K, K, left, K, BP, KP, TILE)
                q = load_tile(q_ + at * K, K, left, K, BP, KP, TILE)
                do = load_tile(d_out_ + at * K, K, left, K, BP, KP, TILE)
                lr = load_row(lr_ + at, left, BP)
                pos = load_row(pos_ + chunk * BP, left, BP)
                x_hat, inverse, r, h, g = learn(
                    k, v, w, bias[None, :], gamma, beta, EPS, K, KP, PRECISION
                )
                a = lower(1.0 + product(q, tl.trans(k), PRECISION), BP)
                e = pos[:, None] * lr[None, :]
                zb = product(q, w, PRECISION) - product(e * a, g, PRECISION) + bias[None, :]
                if CHUNKS > 1:
                    # The sums before this chunk; before the first one they are zero.
                    rows = tl.where(chunk > 0, K, 0)
                    s = load_tile(w_group_ + (slot + chunk) * K * K, K, rows, K, KP, KP)
                    s_bias = load_row(bias_group_ + (slot + chunk) * K, rows, KP)
                    gathered = product(q, s, PRECISION) + s_bias[None, :]
                    zb -= pos[:, None] * gathered
                y_hat, y_inverse = normalise(zb, EPS, K, KP)

                # Through the readings, and through the step to the next state.
                dzb = input_gradient(gamma * do, y_hat, y_inverse, K, KP)
                dp = -lower(product(dzb, tl.trans(g), PRECISION), BP)
                de, da = dp * a, dp * e
                step = (rate * lr)[:, None]
                m = product(k, ds, PRECISION) + ds_bias[None, :]
                mg = tl.sum(m * g, 1)
                dg = step * m - product(tl.trans(e * a), dzb, PRECISION)
                dk = product(tl.trans(da), q, PRECISION)
                dk += product(step * g, tl.trans(ds), PRECISION)
                dgamma += do * y_hat
                dbeta += do

                dz, dr, dgamma_part = inner_gradient_backward(
                    dg, g, h, r, x_hat, inverse, gamma, K, KP
                )
                dgamma += dgamma_part
                dbeta += dr
                dq = do + product(dzb, tl.trans(w), PRECISION) + product(da, k, PRECISION)
                dk += dr + product(dz, tl.trans(w), PRECISION)
                dpos_part = tl.sum(de * lr[None, :], 1)
                if CHUNKS > 1:
                    scaled = pos[:, None] * dzb
                    dq -= product(scaled, tl.trans(s), PRECISION)
                    ds -= product(tl.trans(q), scaled, PRECISION)
                    ds_bias -= tl.sum(scaled, 0)
                    dpos_part -= tl.sum(dzb * gathered, 1)
                else:
                    dt_last -= tl.sum(mg * lr, 0)
                store_tile(dq_ + at * K, K, dq, left, K, BP, KP, TILE)
                store_tile(dk_ + at * K, K, dk, left, K, BP, KP, TILE)
                store_tile(dv_ + at * K, K, -dr, left, K, BP, KP, TILE)
                store_row(dlr_ + at, tl.sum(pos[:, None] * de, 0) + rate * mg, left, BP)
                dpos += tl.where(part == chunk, dpos_part[None, :], 0.0)
                dw = add_product(dw, tl.trans(q), dzb, PRECISION)
                dw = add_product(dw, tl.trans(k), dz, PRECISION)
                dbias += tl.sum(dzb + dz, 0)
    store_tile(dw_ + program * K * K, K, dw, K, K, KP, KP, WEIGHT)
    store_row(dbias_ + program * K, dbias, K, KP)
    dpos += tl.where(place_in_batch == B - 1, dt_last, 0.0)
    tl.store(dpos_ + program * B + place_in_batch, dpos, mask=place_in_batch < B)
    store_row(dgamma_ + program * K, tl.sum(dgamma, 0), K, KP)
    store_row(dbeta_ + program * K, tl.sum(dbeta, 0), K, KP)


@triton.jit
def one_token_kernel(
    q_, k_, v_, lr_, scale_, last_, w_, bias_, w_sum_, bias_sum_, gamma_, beta_,
    out_, w_out_, bias_out_, w_sum_out_, bias_sum_out_,
    EPS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The outputs of the state are its inputs: weights that stay are not written."""
    program = tl.program_id(0).to(tl.int64)
    WEIGHT: tl.constexpr = K == KP
    rows = program * K
    k = load_row(k_ + rows, K, KP)
    q = load_row(q_ + rows, K, KP)
    v = load_row(v_ + rows, K, KP)[None, :]
    gamma = load_row(gamma_ + rows, K, KP)[None, :]
    beta = load_row(beta_ + rows, K, KP)[None, :]
    bias = load_row(bias_ + rows, K, KP)[None, :]
    bias_sum = load_row(bias_sum_ + rows, K, KP)[None, :]
    w = load_tile(w_ + rows * K, K, K, K, KP, KP, WEIGHT)
    w_sum = load_tile(w_sum_ + rows * K, K, K, K, KP, KP, WEIGHT)
    scale, last = tl.load(scale_ + program), tl.load(last_ + program) != 0

    z = tl.sum(k[:, None] * w, 0)[None, :] + bias
    x_hat, inverse = normalise(z, EPS, K, KP)
    h = gamma * (gamma * x_hat + beta - v + k[None, :])
    g = tl.load(lr_ + program) * input_gradient(h, x_hat, inverse, K, KP)
    w_sum += k[:, None] * g
    bias_sum += g
    w -= scale * w_sum
    bias -= scale * bias_sum
    y_hat, inverse = normalise(tl.sum(q[:, None] * w, 0)[None, :] + bias, EPS, K, KP)
    store_tile(out_ + rows, K, q[None, :] + gamma * y_hat + beta, 1, K, 1, KP)
    store_tile(w_sum_out_ + rows * K, K, tl.where(last, 0.0, w_sum), K, K, KP, KP, WEIGHT)
    store_tile(bias_sum_out_ + rows, K, tl.where(last, 0.0, bias_sum), 1, K, 1, KP)
    if last:
        store_tile(w_out_ + rows * K, K, w, K, K, KP, KP, WEIGHT)
        store_tile(bias_out_ + rows, K, bias, 1, K, 1, KP)
