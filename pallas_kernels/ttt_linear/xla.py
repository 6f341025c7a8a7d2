# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear in dual form: a mini-batch as matrix products, forward and backward.

Per mini-batch of b tokens, with the state (W, b) at its start and A = mask(1 + Q K^T):

    Z  = K W + b;  Xh, s = LN(Z);  R = gamma Xh + lambda - V + K;  G = J(gamma R; Xh, s)
    Zb = Q W + b - (t_i l_j A) G;   O = Q + gamma LN(Zb) + lambda
    W <- W - t_last K^T diag(l) G;   b <- b - t_last l G

`ttt_common.scan` walks the mini-batches. One mini-batch of all heads fits a core's cache, which is
why nothing is done for several at once.

Letters: B batch, H heads, b tokens in a mini-batch, K head width. Here everything is float32,
tokens (B, H, b, K), lr (B, H, b), weights (B, H, K, K) and (B, H, K), gamma and beta (H, 1, K).
"""

import functools

import jax.numpy as jnp

from pallas_kernels.ttt_common import scan
from pallas_kernels.ttt_common.dual import (
    after,
    back_rates,
    columns,
    dot,
    dot_t,
    lower,
    row_dot,
    rows,
    t_dot,
)
from pallas_kernels.ttt_common.norm import (
    target_gradient,
    target_gradient_backward,
    whiten,
    whiten_backward,
)
from pallas_kernels.ttt_linear.reference import one_token

__all__ = ["backward", "forward", "learn", "one_token", "predict", "read"]


def predict(k, weights, gamma, beta, eps):
    """f(k), (B, H, b, K)."""
    w, b = weights
    return k + gamma * whiten(dot(k, w) + rows(b), eps)[0] + beta


def learn(k, v, lr, weights, gamma, beta, eps):
    """What the tokens of a mini-batch gather: sum_j l_j k_j^T g_j and sum_j l_j g_j."""
    w, b = weights
    g, _, _ = target_gradient(dot(k, w) + rows(b), k, v, gamma, beta, eps)
    return _sums(k, lr, g)


def read(q, k, v, lr, pos_scale, weights, gamma, beta, eps, gathered=None):
    """The readings of a mini-batch, and the same sums."""
    w, b = weights
    g, _, _ = target_gradient(dot(k, w) + rows(b), k, v, gamma, beta, eps)
    z = dot(q, w) + rows(b)
    if gathered is not None:
        # What the mini-batch's earlier tokens have gathered acts like a bias of each reading.
        z = z - pos_scale[:, None] * (dot(q, gathered[0]) + rows(gathered[1]))
    _, _, y_hat, _ = _look(z, q, k, lr, pos_scale, g, eps)
    out = q + gamma * y_hat + beta
    return out, _sums(k, after(lr, out), g)


def back(q, k, v, lr, pos_scale, weights, gamma, beta, eps, d_out, d_weights):
    """Back through `read` and the step to the next weights; see `ttt_common.scan`."""
    (w, b), (dw, db) = weights, d_weights
    g, x_hat, x_inverse = target_gradient(dot(k, w) + rows(b), k, v, gamma, beta, eps)
    a, e, y_hat, y_inverse = _look(dot(q, w) + rows(b), q, k, lr, pos_scale, g, eps)

    # Through the readings, and through the step.
    dzb = whiten_backward(gamma * d_out, y_hat, y_inverse)
    dp = -lower(dot_t(dzb, g))
    de, da = dp * a, dp * e
    step = columns(pos_scale[-1] * lr)
    m = dot(k, dw) + rows(db)
    mg = row_dot(m, g)
    dg = -t_dot(e * a, dzb) - step * m
    dz, dk, d_gamma, d_beta = target_gradient_backward(dg, g, x_hat, x_inverse, k, v, gamma, beta)

    dq = d_out + dot_t(dzb, w) + dot(da, k)
    dv = -dk
    dk = dk + t_dot(da, q) - step * dot_t(g, dw) + dot_t(dz, w)
    dlr, d_pos = back_rates(de, mg, lr, pos_scale)
    q, k = after(q, dk), after(k, dk)
    dw = dw + t_dot(q, dzb) + t_dot(k, dz)
    db = db + jnp.sum(dzb + dz, -2)
    return (dq, dk, dv, dlr), (dw, db), (d_pos, d_gamma + d_out * y_hat, d_beta + d_out)


forward = functools.partial(scan.forward, read)
backward = functools.partial(scan.backward, learn, back)


def _look(z, q, k, lr, pos_scale, g, eps):
    """A, E[i, j] = t_i l_j, and LN of the readings z - (E A) G with its 1 / sigma."""
    a = lower(1 + dot_t(q, k))
    e = pos_scale[:, None] * rows(lr)
    return a, e, *whiten(z - dot(e * a, g), eps)


def _sums(k, lr, g):
    g = columns(lr) * g
    return t_dot(k, g), jnp.sum(g, -2)
