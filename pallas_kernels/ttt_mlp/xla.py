# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-MLP in dual form: a mini-batch as matrix products, forward and backward.

Per mini-batch of b tokens, with the state (W1, b1, W2, b2) at its start, phi = GELU (tanh) and
A1 = mask(1 + Q K^T), A2 = mask(1 + Xb X2^T):

    Z1 = K W1 + b1;   X2 = phi(Z1);   Z2 = X2 W2 + b2;   Xh, s = LN(Z2)
    G2 = J(gamma (gamma Xh + lambda - V + K); Xh, s);    G1 = (G2 W2^T) phi'(Z1)
    Zb1 = Q W1 + b1 - (t_i l_j A1) G1;   Xb = phi(Zb1)
    Zb2 = Xb W2 + b2 - (t_i l_j A2) G2;  O = Q + gamma LN(Zb2) + lambda
    W1 <- W1 - t_last K^T diag(l) G1;    b1 <- b1 - t_last l G1;   W2, b2 likewise

`ttt_common.scan` walks the mini-batches.

Letters: B batch, H heads, b tokens in a mini-batch, K head width, F inner hidden width. Here
everything is float32, tokens (B, H, b, K), lr (B, H, b), weights (B, H, K, F), (B, H, F),
(B, H, F, K) and (B, H, K), gamma and beta (H, 1, K).
"""

import functools

import jax.numpy as jnp

from pallas_kernels.ttt_common import scan
from pallas_kernels.ttt_common.dual import bias, lower, over_tokens, t
from pallas_kernels.ttt_common.norm import (
    target_gradient,
    target_gradient_backward,
    whiten,
    whiten_backward,
)
from pallas_kernels.ttt_mlp.gelu import gelu, gelu_and_slope, gelu_slope_and_bend
from pallas_kernels.ttt_mlp.reference import one_token

__all__ = ["backward", "forward", "learn", "one_token", "predict", "read"]


def predict(k, weights, gamma, beta, eps):
    """f(k), (B, H, b, K)."""
    w1, b1, w2, b2 = weights
    z = gelu(k @ w1 + bias(b1)) @ w2 + bias(b2)
    return k + gamma * whiten(z, eps)[0] + beta


def learn(k, v, lr, weights, gamma, beta, eps):
    """What the tokens of a mini-batch gather: sum_j l_j k_j^T g1_j, sum_j l_j g1_j, and those of
    the second layer."""
    return _sums(k, lr, *_gradients(k, v, weights, gamma, beta, eps))


def read(q, k, v, lr, pos_scale, weights, gamma, beta, eps, gathered=None):
    """The readings of a mini-batch, and the same sums."""
    w1, b1, w2, b2 = weights
    hidden, g1, g2 = _gradients(k, v, weights, gamma, beta, eps)
    e = pos_scale[:, None] * lr[..., None, :]
    z1 = q @ w1 + bias(b1)
    if gathered is not None:
        # What the mini-batch's earlier tokens have gathered acts like a bias of each reading.
        z1 = z1 - pos_scale[:, None] * (q @ gathered[0] + bias(gathered[1]))
    seen = gelu(z1 - (e * lower(1 + q @ t(k))) @ g1)
    z2 = seen @ w2 + bias(b2)
    if gathered is not None:
        z2 = z2 - pos_scale[:, None] * (seen @ gathered[2] + bias(gathered[3]))
    y_hat, _ = whiten(z2 - (e * lower(1 + seen @ t(hidden))) @ g2, eps)
    return q + gamma * y_hat + beta, _sums(k, lr, hidden, g1, g2)


def back(q, k, v, lr, pos_scale, weights, gamma, beta, eps, d_out, d_weights):
    """Back through `read` and the step to the next weights; see `ttt_common.scan`."""
    (w1, b1, w2, b2), (dw1, db1, dw2, db2) = weights, d_weights
    hidden, slope, bend = gelu_slope_and_bend(k @ w1 + bias(b1))
    g2, x_hat, x_inverse = target_gradient(hidden @ w2 + bias(b2), k, v, gamma, beta, eps)
    before = g2 @ t(w2)
    g1 = before * slope
    e = pos_scale[:, None] * lr[..., None, :]
    a1 = lower(1 + q @ t(k))
    seen, seen_slope = gelu_and_slope(q @ w1 + bias(b1) - (e * a1) @ g1)
    a2 = lower(1 + seen @ t(hidden))
    y_hat, y_inverse = whiten(seen @ w2 + bias(b2) - (e * a2) @ g2, eps)

    # Through the readings, and through the step: the second layer, then the first.
    step = (pos_scale[-1] * lr)[..., None]
    dzb2 = whiten_backward(gamma * d_out, y_hat, y_inverse)
    dp2 = -lower(dzb2 @ t(g2))
    da2 = dp2 * e
    m2 = hidden @ dw2 + bias(db2)
    dg2 = -(t(e * a2) @ dzb2) - step * m2
    d_hidden = t(da2) @ seen - step * (g2 @ t(dw2))
    dzb1 = (dzb2 @ t(w2) + da2 @ hidden) * seen_slope
    dp1 = -lower(dzb1 @ t(g1))
    da1 = dp1 * e
    m1 = k @ dw1 + bias(db1)
    dg1 = -(t(e * a1) @ dzb1) - step * m1
    de = dp1 * a1 + dp2 * a2
    mg = jnp.sum(m1 * g1, -1) + jnp.sum(m2 * g2, -1)

    # Through the inner gradients.
    d_before = dg1 * slope
    dg2 = dg2 + d_before @ w2
    dz2, dk, d_gamma, d_beta = target_gradient_backward(
        dg2, g2, x_hat, x_inverse, k, v, gamma, beta
    )
    d_hidden = d_hidden + dz2 @ t(w2)
    dz1 = dg1 * before * bend + d_hidden * slope

    dq = d_out + dzb1 @ t(w1) + da1 @ k
    dv = -dk
    dk = dk + t(da1) @ q - step * (g1 @ t(dw1)) + dz1 @ t(w1)
    dlr = jnp.sum(pos_scale[:, None] * de, -2) - pos_scale[-1] * mg
    d_pos = jnp.sum(de * lr[..., None, :], -1)
    d_pos = d_pos.at[..., -1].add(-jnp.sum(mg * lr, -1))
    d_weights = (
        dw1 + t(q) @ dzb1 + t(k) @ dz1,
        db1 + over_tokens(dzb1 + dz1),
        dw2 + t(seen) @ dzb2 + t(hidden) @ dz2 + t(d_before) @ g2,
        db2 + over_tokens(dzb2 + dz2),
    )
    return (dq, dk, dv, dlr), d_weights, (d_pos, d_gamma + d_out * y_hat, d_beta + d_out)


forward = functools.partial(scan.forward, read)
backward = functools.partial(scan.backward, learn, back)


def _gradients(k, v, weights, gamma, beta, eps):
    """The hidden values of the keys, and the inner gradients G1 and G2."""
    w1, b1, w2, b2 = weights
    hidden, slope = gelu_and_slope(k @ w1 + bias(b1))
    g2, _, _ = target_gradient(hidden @ w2 + bias(b2), k, v, gamma, beta, eps)
    return hidden, (g2 @ t(w2)) * slope, g2


def _sums(k, lr, hidden, g1, g2):
    g1, g2 = lr[..., None] * g1, lr[..., None] * g2
    return t(k) @ g1, over_tokens(g1), t(hidden) @ g2, over_tokens(g2)
