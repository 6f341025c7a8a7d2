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
everything is float32, tokens (B, H, b, K), lr (B, H, b), gamma and beta (H, 1, K). Hidden values
stand in columns, (B, H, F, b), and W1 is kept as (B, H, F, K): so no product needs an operand
turned, of which a CPU would first make a copy.
"""

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
    weigh,
)
from pallas_kernels.ttt_common.norm import (
    target_gradient,
    target_gradient_backward,
    whiten,
    whiten_backward,
)
from pallas_kernels.ttt_mlp.gelu import gelu, gelu_and_slope, gelu_slope_and_bend
from pallas_kernels.ttt_mlp.reference import one_token

__all__ = ["backward", "forward", "learn", "one_token", "predict", "read"]


def forward(q, k, v, lr, pos_scale, weights, gamma, beta, **options):
    """See `ttt_common.scan`."""
    out, last, starts = scan.forward(
        _read, q, k, v, lr, pos_scale, _turn(weights), gamma, beta, **options
    )
    return out, _turn(last), _turn(starts)


def backward(q, k, v, lr, pos_scale, starts, gamma, beta, d_out, d_weights, **options):
    """See `ttt_common.scan`."""
    arrays = q, k, v, lr, pos_scale, _turn(starts), gamma, beta, d_out, _turn(d_weights)
    *tokens, d_weights, d_gamma, d_beta = scan.backward(_learn, _back, *arrays, **options)
    return *tokens, _turn(d_weights), d_gamma, d_beta


def read(q, k, v, lr, pos_scale, weights, gamma, beta, eps, gathered=None):
    """The readings of a mini-batch, and its sums; `gathered` by its earlier tokens."""
    gathered = None if gathered is None else _turn(gathered)
    out, sums = _read(q, k, v, lr, pos_scale, _turn(weights), gamma, beta, eps, gathered)
    return out, _turn(sums)


def learn(k, v, lr, weights, gamma, beta, eps):
    """The sums alone."""
    return _turn(_learn(k, v, lr, _turn(weights), gamma, beta, eps))


def predict(k, weights, gamma, beta, eps):
    """f(k), (B, H, b, K)."""
    w1, b1, w2, b2 = weights
    z = gelu(k @ w1 + rows(b1)) @ w2 + rows(b2)
    return k + gamma * whiten(z, eps)[0] + beta


# With W1 as (..., F, K).


def _turn(weights):
    w1, b1, w2, b2 = weights
    return jnp.swapaxes(w1, -1, -2), b1, w2, b2


def _learn(k, v, lr, weights, gamma, beta, eps):
    return _sums(k, lr, *_gradients(k, v, weights, gamma, beta, eps))


def _read(q, k, v, lr, pos_scale, weights, gamma, beta, eps, gathered=None):
    w1, b1, w2, b2 = weights
    hidden, g1, g2 = _gradients(k, v, weights, gamma, beta, eps)
    e = pos_scale[:, None] * rows(lr)
    z1 = dot_t(w1, q) + columns(b1)
    if gathered is not None:
        # What the mini-batch's earlier tokens have gathered acts like a bias of each reading.
        z1 = z1 - pos_scale * (dot_t(gathered[0], q) + columns(gathered[1]))
    seen = gelu(z1 - dot_t(g1, e * lower(1 + dot_t(q, k))))
    z2 = t_dot(seen, w2) + rows(b2)
    if gathered is not None:
        z2 = z2 - pos_scale[:, None] * (t_dot(seen, gathered[2]) + rows(gathered[3]))
    y_hat, _ = whiten(z2 - dot(e * lower(1 + t_dot(seen, hidden)), g2), eps)
    out = q + gamma * y_hat + beta
    return out, _sums(k, after(lr, out), hidden, g1, g2)


def _back(q, k, v, lr, pos_scale, weights, gamma, beta, eps, d_out, d_weights):
    """Back through `read` and the step to the next weights."""
    (w1, b1, w2, b2), (dw1, db1, dw2, db2) = weights, d_weights
    hidden, slope, bend = gelu_slope_and_bend(dot_t(w1, k) + columns(b1))
    g2, x_hat, x_inverse = target_gradient(t_dot(hidden, w2) + rows(b2), k, v, gamma, beta, eps)
    before = dot_t(w2, g2)
    g1 = before * slope
    e = pos_scale[:, None] * rows(lr)
    a1 = lower(1 + dot_t(q, k))
    p1 = e * a1
    seen, seen_slope = gelu_and_slope(dot_t(w1, q) + columns(b1) - dot_t(g1, p1))
    a2 = lower(1 + t_dot(seen, hidden))
    p2 = e * a2
    y_hat, y_inverse = whiten(t_dot(seen, w2) + rows(b2) - dot(p2, g2), eps)

    # Through the readings, and through the step: the second layer, then the first.
    step = pos_scale[-1] * lr
    dzb2 = whiten_backward(gamma * d_out, y_hat, y_inverse)
    dp2 = -lower(dot_t(dzb2, g2))
    da2 = dp2 * e
    m2 = t_dot(hidden, dw2) + rows(db2)
    dg2 = -t_dot(p2, dzb2) - columns(step) * m2
    d_hidden = dot(seen, da2) - rows(step) * dot_t(dw2, g2)
    dzb1 = (dot_t(w2, dzb2) + dot_t(hidden, da2)) * seen_slope
    dp1 = -lower(t_dot(dzb1, g1))
    da1 = dp1 * e
    dg1 = -dot(dzb1, p1) - rows(step) * (dot_t(dw1, k) + columns(db1))
    g1_dw1 = t_dot(g1, dw1)
    de = dp1 * a1 + dp2 * a2
    mg = (
        row_dot(g1_dw1, k)
        + jnp.einsum("bhfj,bhf->bhj", g1, db1, precision="highest")
        + row_dot(m2, g2)
    )

    # Through the inner gradients.
    d_before = dg1 * slope
    dg2 = dg2 + t_dot(d_before, w2)
    dz2, dk, d_gamma, d_beta = target_gradient_backward(
        dg2, g2, x_hat, x_inverse, k, v, gamma, beta
    )
    d_hidden = d_hidden + dot_t(w2, dz2)
    dz1 = dg1 * before * bend + d_hidden * slope

    dq = d_out + t_dot(dzb1, w1) + dot(da1, k)
    dv = -dk
    dk = dk + t_dot(da1, q) - columns(step) * g1_dw1 + t_dot(dz1, w1)
    dlr, d_pos = back_rates(de, mg, lr, pos_scale)
    q, k, dzb2, dz2, g2 = (after(x, dk) for x in (q, k, dzb2, dz2, g2))
    d_weights = (
        dw1 + dot(dzb1, q) + dot(dz1, k),
        db1 + weigh(dzb1 + dz1, jnp.ones_like(lr)),
        dw2 + dot(seen, dzb2) + dot(hidden, dz2) + dot(d_before, g2),
        db2 + jnp.sum(dzb2 + dz2, -2),
    )
    return (dq, dk, dv, dlr), d_weights, (d_pos, d_gamma + d_out * y_hat, d_beta + d_out)


def _gradients(k, v, weights, gamma, beta, eps):
    """The hidden values of the keys, and the inner gradients G1 and G2."""
    w1, b1, w2, b2 = weights
    hidden, slope = gelu_and_slope(dot_t(w1, k) + columns(b1))
    g2, _, _ = target_gradient(t_dot(hidden, w2) + rows(b2), k, v, gamma, beta, eps)
    return hidden, dot_t(w2, g2) * slope, g2


def _sums(k, lr, hidden, g1, g2):
    """sum_j l_j k_j^T g1_j, sum_j l_j g1_j, and those of the second layer."""
    g2 = columns(lr) * g2
    return dot(g1, columns(lr) * k), weigh(g1, lr), dot(hidden, g2), jnp.sum(g2, -2)
