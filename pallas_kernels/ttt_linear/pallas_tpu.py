# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear on the TPU: one mini-batch, for the kernels of `ttt_common.pallas_tpu`.

The equations are those of `xla.py`. Letters as in `ttt_common.pallas_tpu`; weights (N, L, L), block
diagonal, and biases (N, 1, L).

Costs for K = 64, b = 16, checkpoint_every = 16, per token and head (two in a pack), float32 /
bfloat16 inputs. Read and written: forward 1,100 / 590 bytes (q, k, v, out; lr 16; stored weights
65), backward 1,890 / 990. FLOPs: forward 6 K^2 + 4 b K, backward 20 K^2 + 12 b K with all
recomputation; twice that on the matrix unit, whose other half would stand empty. VMEM, three packs
in a block, as compiled for v5e in float32: forward 4.5 MiB, backward 12.6 (two packs of b = 64:
18.2). Temporaries of all gradients against those of "xla", compiled for v5e at B = 8, H = 12,
T = 2048: 0.45 / 0.38; with K = 96, whose tokens are padded to 128 lanes, about 1.1 / 1.0.
"""

import types

import jax.numpy as jnp

from pallas_kernels.ttt_common import pallas_tpu as common
from pallas_kernels.ttt_common import tpu_packs as packs
from pallas_kernels.ttt_common.tpu_packs import dot
from pallas_kernels.ttt_linear.state import TTTLinearState


def _step(k, lr, pos, g, weights, pack):
    w, bias = weights
    step = pos[-1:] * packs.rates(lr, *k.shape[1:], pack) * g
    w = w - packs.block_diagonal(dot(k, step, 0, 0, pack), pack)
    return w, bias - jnp.sum(step, 1, keepdims=True)


def _read(q, k, v, lr, pos, weights, gamma, beta, pack):
    """What was learned from k and v, stacked k and G, A, E, and the normalised readings."""
    b = q.shape[1]
    w, bias = weights
    # One product for both: few rows leave the matrix unit idle.
    z = dot(jnp.concatenate([k, q], 1), w, 1, 0, pack) + bias
    learned = packs.learn(z[:, :b], k, v, gamma, beta, pack)
    k_stack, g_stack = packs.stack(k, pack), packs.stack(learned[2], pack)
    a = packs.lower(1 + dot(q, k_stack, 1, 1, pack), pack)
    e = pos * lr
    read = packs.normalise(z[:, b:] - dot(e * a, g_stack, 1, 0, pack), pack)
    return learned, k_stack, g_stack, a, e, read


def _forward(q, k, v, lr, pos, weights, gamma, beta, pack):
    learned, *_, read = _read(q, k, v, lr, pos, weights, gamma, beta, pack)
    return q + gamma * read[0] + beta, _step(k, lr, pos, learned[2], weights, pack)


def _advance(k, v, lr, pos, weights, gamma, beta, pack):
    w, bias = weights
    learned = packs.learn(dot(k, w, 1, 0, pack) + bias, k, v, gamma, beta, pack)
    return _step(k, lr, pos, learned[2], weights, pack)


def _backward(q, k, v, lr, pos, weights, gamma, beta, do, d_weights, pack):
    b, L = q.shape[1:]
    w, (dw, dbias) = weights[0], d_weights
    learned, k_stack, g_stack, a, e, (y_hat, y_inverse) = _read(
        q, k, v, lr, pos, weights, gamma, beta, pack
    )
    g = learned[2]

    # Through the readings, and through the step to the next state.
    dzb = packs.normalise_input_gradient(gamma * do, y_hat, y_inverse, pack)
    dp = -packs.lower(dot(dzb, g_stack, 1, 1, pack), pack)
    de, da = dp * a, dp * e
    rate = pos[-1:] * packs.rates(lr, b, L, pack)
    m = dot(k, dw, 1, 0, pack) + dbias
    mg = packs.as_row(packs.sums(m * g, pack))
    dg = -packs.unstack(dot(e * a, dzb, 0, 0, pack), pack) - rate * m
    dz, dr, d_gamma = packs.learn_transpose(dg, learned, k, v, gamma, beta, pack)

    through_w = dot(jnp.concatenate([dzb, dz], 1), w, 1, 1, pack)
    dq = do + through_w[:, :b] + dot(da, k_stack, 1, 0, pack)
    dk = dr + through_w[:, b:] - rate * dot(g, dw, 1, 1, pack)
    dk = dk + packs.unstack(dot(da, q, 0, 0, pack), pack)
    tokens, d_tokens = jnp.concatenate([q, k], 1), jnp.concatenate([dzb, dz], 1)
    dw = dw + packs.block_diagonal(dot(tokens, d_tokens, 0, 0, pack), pack)
    dbias = dbias + jnp.sum(d_tokens, 1, keepdims=True)
    shared = (
        packs.d_positions(de, lr, mg),
        jnp.sum(do * y_hat + d_gamma, 1, keepdims=True),
        jnp.sum(do + dr, 1, keepdims=True),
    )
    dlr = jnp.sum(pos * de, 1, keepdims=True) - pos[-1:] * mg
    return (dq, dk, -dr), dlr, shared, (dw, dbias)


def _gather(k, v, weights, gamma, beta, pack):
    _, _, g = packs.learn(_predict(k, weights), k, v, gamma, beta, pack)
    return packs.as_column(k) * g, g


def _predict(q, weights):
    w, bias = weights
    return packs.vector_product(q, w) + bias


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
