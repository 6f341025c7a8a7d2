# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-MLP on the TPU: one mini-batch, for the kernels of `ttt_common.pallas_tpu`.

The equations are those of `xla.py`. Letters as in `ttt_common.pallas_tpu`, and M = heads F hidden
lanes; w1 and the transposed w2 (N, L, M), block-diagonal, b1 (N, 1, M), b2 (N, 1, L). Transposed,
w2 fills the lanes, which K = 64 would not.

Costs for K = 64, F = 256, b = 16, checkpoint_every = 16, per token and head (two in a pack),
float32 / bfloat16 inputs. Read and written: forward 1,560 / 1,050 bytes (q, k, v, out; lr 16;
stored weights 517), backward 2,340 / 1,450. FLOPs: forward 56 K^2 + 20 b K, backward
192 K^2 + 60 b K with all recomputation; twice that on the matrix unit, whose other half would stand
empty. VMEM as compiled for v5e in float32: forward 11.4 MiB (three packs in a block), backward 19.7
(two packs; one pack of b = 64: 11.7). Temporaries of all gradients against those of "xla", compiled
for v5e at B = 4, H = 12, T = 2048: 0.37 / 0.34; with K = 96 and 16 heads, bfloat16, 0.62.
"""

import types

import jax.numpy as jnp

from pallas_kernels.ttt_common import pallas_tpu as common
from pallas_kernels.ttt_common import tpu_packs as packs
from pallas_kernels.ttt_common.tpu_packs import dot
from pallas_kernels.ttt_mlp.gelu import gelu, gelu_and_slope, gelu_slope_and_bend
from pallas_kernels.ttt_mlp.state import TTTMLPState


def _step(k, hidden, lr, pos, g1, g2, weights, pack):
    w1, b1, w2, b2 = weights
    b = k.shape[1]
    step1 = pos[-1:] * packs.rates(lr, b, hidden.shape[2], pack) * g1
    step2 = pos[-1:] * packs.rates(lr, b, k.shape[2], pack) * g2
    return (
        w1 - packs.block_diagonal(dot(k, step1, 0, 0, pack), pack),
        b1 - jnp.sum(step1, 1, keepdims=True),
        w2 - packs.block_diagonal(dot(step2, hidden, 0, 0, pack), pack),
        b2 - jnp.sum(step2, 1, keepdims=True),
    )


def _forward(q, k, v, lr, pos, weights, gamma, beta, pack):
    b = q.shape[1]
    w1, b1, w2, b2 = weights
    # One product for both: few rows leave the matrix unit idle.
    z1 = dot(jnp.concatenate([k, q], 1), w1, 1, 0, pack) + b1
    hidden, slope = gelu_and_slope(z1[:, :b])
    _, _, g2 = packs.learn(dot(hidden, w2, 1, 1, pack) + b2, k, v, gamma, beta, pack)
    g1 = dot(g2, w2, 1, 0, pack) * slope
    e = pos * lr
    p1 = e * packs.lower(1 + dot(q, packs.stack(k, pack), 1, 1, pack), pack)
    seen, _ = gelu_and_slope(z1[:, b:] - dot(p1, packs.stack(g1, pack), 1, 0, pack))
    p2 = e * packs.lower(1 + dot(seen, packs.stack(hidden, pack), 1, 1, pack), pack)
    zb2 = dot(seen, w2, 1, 1, pack) + b2 - dot(p2, packs.stack(g2, pack), 1, 0, pack)
    y_hat, _ = packs.normalise(zb2, pack)
    return q + gamma * y_hat + beta, _step(k, hidden, lr, pos, g1, g2, weights, pack)


def _advance(k, v, lr, pos, weights, gamma, beta, pack):
    w1, b1, w2, b2 = weights
    hidden, slope = gelu_and_slope(dot(k, w1, 1, 0, pack) + b1)
    _, _, g2 = packs.learn(dot(hidden, w2, 1, 1, pack) + b2, k, v, gamma, beta, pack)
    g1 = dot(g2, w2, 1, 0, pack) * slope
    return _step(k, hidden, lr, pos, g1, g2, weights, pack)


def _backward(q, k, v, lr, pos, weights, gamma, beta, do, d_weights, pack):
    b, L = q.shape[1:]
    (w1, b1, w2, b2), (dw1, db1, dw2, db2) = weights, d_weights
    z1 = dot(jnp.concatenate([k, q], 1), w1, 1, 0, pack) + b1
    hidden, slope, bend = gelu_slope_and_bend(z1[:, :b])
    learned = packs.learn(dot(hidden, w2, 1, 1, pack) + b2, k, v, gamma, beta, pack)
    g2 = learned[2]
    before = dot(g2, w2, 1, 0, pack)
    g1 = before * slope
    k_stack, hidden_stack, g1_stack, g2_stack = (packs.stack(x, pack) for x in (k, hidden, g1, g2))
    e = pos * lr
    a1 = packs.lower(1 + dot(q, k_stack, 1, 1, pack), pack)
    seen, seen_slope = gelu_and_slope(z1[:, b:] - dot(e * a1, g1_stack, 1, 0, pack))
    a2 = packs.lower(1 + dot(seen, hidden_stack, 1, 1, pack), pack)
    zb2 = dot(seen, w2, 1, 1, pack) + b2 - dot(e * a2, g2_stack, 1, 0, pack)
    y_hat, y_inverse = packs.normalise(zb2, pack)

    # Through the readings, and through the step: the second layer, then the first.
    rate1 = pos[-1:] * packs.rates(lr, b, hidden.shape[2], pack)
    rate2 = pos[-1:] * packs.rates(lr, b, L, pack)
    dzb2 = packs.normalise_input_gradient(gamma * do, y_hat, y_inverse, pack)
    dp2 = -packs.lower(dot(dzb2, g2_stack, 1, 1, pack), pack)
    da2 = dp2 * e
    m2 = dot(hidden, dw2, 1, 1, pack) + db2
    dg2 = -packs.unstack(dot(e * a2, dzb2, 0, 0, pack), pack) - rate2 * m2
    d_hidden = packs.unstack(dot(da2, seen, 0, 0, pack), pack) - rate1 * dot(g2, dw2, 1, 0, pack)
    dzb1 = (dot(dzb2, w2, 1, 0, pack) + dot(da2, hidden_stack, 1, 0, pack)) * seen_slope
    dp1 = -packs.lower(dot(dzb1, g1_stack, 1, 1, pack), pack)
    da1 = dp1 * e
    m1 = dot(k, dw1, 1, 0, pack) + db1
    dg1 = -packs.unstack(dot(e * a1, dzb1, 0, 0, pack), pack) - rate1 * m1
    de = dp1 * a1 + dp2 * a2
    mg = zip(packs.sums(m1 * g1, pack), packs.sums(m2 * g2, pack))
    mg = packs.as_row([first + second for first, second in mg])

    # Through the inner gradients.
    d_before = dg1 * slope
    dg2 = dg2 + dot(d_before, w2, 1, 1, pack)
    dz2, dr, d_gamma = packs.learn_transpose(dg2, learned, k, v, gamma, beta, pack)
    d_hidden = d_hidden + dot(dz2, w2, 1, 0, pack)
    dz1 = dg1 * before * bend + d_hidden * slope

    d_layer1, d_layer2 = jnp.concatenate([dzb1, dz1], 1), jnp.concatenate([dzb2, dz2, g2], 1)
    through_w1 = dot(d_layer1, w1, 1, 1, pack)
    dq = do + through_w1[:, :b] + dot(da1, k_stack, 1, 0, pack)
    dk = dr + through_w1[:, b:] - rate2 * dot(g1, dw1, 1, 1, pack)
    dk = dk + packs.unstack(dot(da1, q, 0, 0, pack), pack)
    d_new1 = dot(jnp.concatenate([q, k], 1), d_layer1, 0, 0, pack)
    d_new2 = dot(d_layer2, jnp.concatenate([seen, hidden, d_before], 1), 0, 0, pack)
    new = (
        dw1 + packs.block_diagonal(d_new1, pack),
        db1 + jnp.sum(d_layer1, 1, keepdims=True),
        dw2 + packs.block_diagonal(d_new2, pack),
        db2 + jnp.sum(dzb2 + dz2, 1, keepdims=True),
    )
    shared = (
        packs.d_positions(de, lr, mg),
        jnp.sum(do * y_hat + d_gamma, 1, keepdims=True),
        jnp.sum(do + dr, 1, keepdims=True),
    )
    dlr = jnp.sum(pos * de, 1, keepdims=True) - pos[-1:] * mg
    return (dq, dk, -dr), dlr, shared, new


def _gather(k, v, weights, gamma, beta, pack):
    w1, b1, w2, b2 = weights
    hidden, slope = gelu_and_slope(packs.vector_product(k, w1) + b1)
    z2 = packs.vector_product(hidden, w2) + b2
    _, _, g2 = packs.learn(z2, k, v, gamma, beta, pack)
    g1 = packs.as_row([jnp.sum(w2 * g2, -1, keepdims=True)]) * slope
    return packs.as_column(k) * g1, g1, packs.as_column(hidden) * g2, g2


def _predict(q, weights):
    w1, b1, w2, b2 = weights
    hidden = gelu(packs.vector_product(q, w1) + b1)
    return packs.vector_product(hidden, w2) + b2


_ARITHMETIC = types.SimpleNamespace(
    forward=_forward, advance=_advance, backward=_backward, gather=_gather, predict=_predict
)


def forward(q, k, v, lr, pos_scale, weights, gamma, beta, *, eps, every):
    """Outputs, last weights, and the weights at the start of every `every`-th mini-batch.

    q, k, v (B, H, T, K) float32 or bfloat16, T whole mini-batches; lr (B, H, T), pos_scale (b,),
    weights (w1 (B, H, K, F), b1 (B, H, F), w2 (B, H, F, K), b2 (B, H, K)), gamma and beta (H, K)
    float32.
    """
    out, last, starts = common.forward(
        _ARITHMETIC, q, k, v, lr, pos_scale, _in(weights), gamma, beta, eps=eps, every=every
    )
    return out, _out(last), _out(starts)


def backward(q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights, *, eps, every):
    """(dq, dk, dv, dlr, dpos_scale, d_weights at the start, dgamma, dbeta)."""
    *grads, d_start, d_gamma, d_beta = common.backward(
        _ARITHMETIC,
        *(q, k, v, lr, pos_scale, _in(starts), gamma, beta, d_out, _in(d_weights)),
        eps=eps,
        every=every,
    )
    return *grads, _out(d_start), d_gamma, d_beta


def one_token(q, k, v, lr, scale, last, state, gamma, beta, *, eps):
    """The decode step: q, k, v (B, H, K), lr (B, H), scale and last (B,), the whole state."""
    rows = tuple(x[..., None, :] if x.ndim == 3 else x for x in state)
    out, new = common.one_token(_ARITHMETIC, q, k, v, lr, scale, last, rows, gamma, beta, eps=eps)
    return out, TTTMLPState(*(x.reshape(y.shape) for x, y in zip(new, state)))


def unsupported(K, b, F, dtype) -> str | None:
    """Why these sizes cannot run, or None."""
    return common.unsupported(K, b, ((K, F), (1, F), (K, F), (1, K)), dtype)


def _in(weights):
    w1, b1, w2, b2 = weights
    return w1, b1[..., None, :], jnp.swapaxes(w2, -1, -2), b2[..., None, :]


def _out(weights):
    w1, b1, w2, b2 = weights
    return w1, b1[..., 0, :], jnp.swapaxes(w2, -1, -2), b2[..., 0, :]
