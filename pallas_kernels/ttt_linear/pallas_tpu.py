# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear on the TPU: one mini-batch, for the kernels of `ttt_common.pallas_tpu`.

The equations are those of `xla.py`. Letters as in `ttt_common.pallas_tpu`; weights (N, L, L), block
diagonal, and biases (N, 1, L).
"""

import types

import jax.numpy as jnp

from pallas_kernels.ttt_common import pallas_tpu as common
from pallas_kernels.ttt_common.pallas_tpu import dot
from pallas_kernels.ttt_linear.state import TTTLinearState


def _step(k, lr, pos, g, weights, pack):
    w, bias = weights
    step = pos[-1:] * common.rates(lr, *k.shape[1:], pack) * g
    w = w - common.block_diagonal(dot(k, step, 0, 0, pack), pack)
    return w, bias - jnp.sum(step, 1, keepdims=True)


def _read(q, k, v, lr, pos, weights, gamma, beta, pack):
    """What was learned from k and v, stacked k and G, A, E, and the normalised readings."""
    b = q.shape[1]
    w, bias = weights
    # One product for both: few rows leave the matrix unit idle.
    z = dot(jnp.concatenate([k, q], 1), w, 1, 0, pack) + bias
    learned = common.learn(z[:, :b], k, v, gamma, beta, pack)
    k_stack, g_stack = common.stack(k, pack), common.stack(learned[2], pack)
    a = common.lower(1 + dot(q, k_stack, 1, 1, pack), pack)
    e = pos * lr
    read = common.normalise(z[:, b:] - dot(e * a, g_stack, 1, 0, pack), pack)
    return learned, k_stack, g_stack, a, e, read


def _forward(q, k, v, lr, pos, weights, gamma, beta, pack):
    learned, *_, read = _read(q, k, v, lr, pos, weights, gamma, beta, pack)
    return q + gamma * read[0] + beta, _step(k, lr, pos, learned[2], weights, pack)


def _advance(k, v, lr, pos, weights, gamma, beta, pack):
    w, bias = weights
    learned = common.learn(dot(k, w, 1, 0, pack) + bias, k, v, gamma, beta, pack)
    return _step(k, lr, pos, learned[2], weights, pack)


def _backward(q, k, v, lr, pos, weights, gamma, beta, do, d_weights, pack):
    b, L = q.shape[1:]
    w, (dw, dbias) = weights[0], d_weights
    learned, k_stack, g_stack, a, e, (y_hat, y_inverse) = _read(
        q, k, v, lr, pos, weights, gamma, beta, pack
    )
    g = learned[2]

    # Through the readings, and through the step to the next state.
    dzb = common.normalise_input_gradient(gamma * do, y_hat, y_inverse, pack)
    dp = -common.lower(dot(dzb, g_stack, 1, 1, pack), pack)
    de, da = dp * a, dp * e
    rate = pos[-1:] * common.rates(lr, b, L, pack)
    m = dot(k, dw, 1, 0, pack) + dbias
    mg = common.as_row(common.sums(m * g, pack))
    dg = -common.unstack(dot(e * a, dzb, 0, 0, pack), pack) - rate * m
    dz, dr, d_gamma = common.learn_transpose(dg, learned, k, v, gamma, beta, pack)

    through_w = dot(jnp.concatenate([dzb, dz], 1), w, 1, 1, pack)
    dq = do + through_w[:, :b] + dot(da, k_stack, 1, 0, pack)
    dk = dr + through_w[:, b:] - rate * dot(g, dw, 1, 1, pack)
    dk = dk + common.unstack(dot(da, q, 0, 0, pack), pack)
    tokens, d_tokens = jnp.concatenate([q, k], 1), jnp.concatenate([dzb, dz], 1)
    dw = dw + common.block_diagonal(dot(tokens, d_tokens, 0, 0, pack), pack)
    dbias = dbias + jnp.sum(d_tokens, 1, keepdims=True)
    shared = (
        common.d_positions(de, lr, mg),
        jnp.sum(do * y_hat + d_gamma, 1, keepdims=True),
        jnp.sum(do + dr, 1, keepdims=True),
    )
    dlr = jnp.sum(pos * de, 1, keepdims=True) - pos[-1:] * mg
    return (dq, dk, -dr), dlr, shared, (dw, dbias)


def _gather(k, v, weights, gamma, beta, pack):
    _, _, g = common.learn(_predict(k, weights), k, v, gamma, beta, pack)
    return common.as_column(k) * g, g


def _predict(q, weights):
    w, bias = weights
    return common.vector_product(q, w) + bias


_ARITHMETIC = types.SimpleNamespace(
    forward=_forward, advance=_advance, backward=_backward, gather=_gather, predict=_predict
)


def forward(q, k, v, lr, pos_scale, weights, gamma, beta, *, eps, every):
    """Outputs, last weights, and the weights at the start of every `every`-th mini-batch.

    q, k, v (B, H, T, K) float32 or bfloat16, T whole mini-batches; lr (B, H, T), pos_scale (b,),
    weights (w (B, H, K, K), b (B, H, K)), gamma and beta (H, K) float32.
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
    return out, TTTLinearState(*(x.reshape(y.shape) for x, y in zip(new, state)))


def unsupported(K, b, F, dtype) -> str | None:
    """Why these sizes cannot run, or None."""
    del F
    return common.unsupported(K, b, ((K, K), (1, K)), dtype)


def _in(weights):
    w, b = weights
    return w, b[..., None, :]


def _out(weights):
    w, b = weights
    return w, b[..., 0, :]
