# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear in dual form: mini-batches as matrix products, with a backward pass of its own.

Per mini-batch of b tokens, with the state (W, b) at its start and A = mask(1 + Q K^T):

    Z = K W + b;  Xh, s = LN(Z);  R = gamma Xh + lambda - V + K;  G = J(gamma R; Xh, s)
    Zb = Q W + b - (t_i l_j A) G;   O = Q + gamma LN(Zb) + lambda
    W <- W - t_last K^T diag(l) G;   b <- b - t_last l G

The forward pass keeps the state at the start of every `checkpoint_every`-th mini-batch, besides its
inputs in their own dtype. The backward pass walks those groups in reverse: it reruns the states of
one group, then goes back through its mini-batches, each from its inputs and its start state alone.

A mini-batch is cut out of the arrays where it is needed and its results are written in place: with
the mini-batches moved to the front for `scan`, each pass would first copy everything. One
mini-batch of all heads fits a core's cache, which is why nothing is done for several at once.

Letters: B batch, H heads, n mini-batches, b tokens in a mini-batch, K head width. What is computed
inside is float32, tokens (B, H, b, K), weights (B, H, K, K), biases (B, H, 1, K).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ttt_linear.reference import inner_gradient
from pallas_kernels.ttt_linear.state import TTTLinearState


def ttt_linear_xla(
    q, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, phase, valid, eps, checkpoint_every
):
    """See `api.ttt_linear`; q, k, v in any float dtype, the rest float32."""
    if phase is None and valid is None:
        return _aligned(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, eps, checkpoint_every)
    B, _, T, _ = q.shape
    phase = jnp.zeros((B,), jnp.int32) if phase is None else phase
    valid = jnp.ones((B, T), bool) if valid is None else valid
    run = _one_token if T == 1 else _continued
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return run(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, eps)


def _learn(k, v, w, bias, gamma, beta, eps):
    """LN of the inner prediction, 1 / sigma and the inner gradients G, one row per token."""
    x_hat, inverse = _normalise(k @ w + bias, eps)
    h = gamma * (gamma * x_hat + beta - v + k)
    return x_hat, inverse, _normalise_input_gradient(h, x_hat, inverse)


def _read(q, k, lr, pos_scale, w, bias, g, eps):
    """A, E[i, j] = t_i l_j, and LN of the readings with its 1 / sigma."""
    a = _lower(1 + q @ _t(k))
    e = pos_scale[:, None] * lr[..., None, :]
    y_hat, inverse = _normalise(q @ w + bias - (e * a) @ g, eps)
    return a, e, y_hat, inverse


# The aligned path: every sequence stands at the start of a mini-batch.


def _aligned(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, eps, checkpoint_every):
    B, H, T, K = q.shape
    b = pos_scale.shape[0]
    whole = T // b * b
    w, bias, outputs = state.w, state.b[:, :, None], []
    if whole:
        pieces = (x[:, :, :whole].reshape(B, H, -1, b, *x.shape[3:]) for x in (q, k, v, lr))
        out, w, bias = _whole(
            eps, checkpoint_every, *pieces, pos_scale, w, bias, ln_scale[:, None], ln_bias[:, None]
        )
        outputs.append(out.reshape(B, H, whole, K))
    w_sum, b_sum = jnp.zeros_like(w), jnp.zeros_like(bias)
    if whole < T:
        # The first tokens of a mini-batch: outputs and running sums; the state stays.
        rest = (x[:, :, whole:].astype(jnp.float32) for x in (q, k, v, lr))
        out, w_sum, b_sum = _partial(*rest, pos_scale, w, bias, ln_scale, ln_bias, eps)
        outputs.append(out.astype(q.dtype))
    out = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, 2)
    return out, TTTLinearState(w=w, b=bias[:, :, 0], w_sum=w_sum, b_sum=b_sum[:, :, 0])


def _partial(q, k, v, lr, pos_scale, w, bias, ln_scale, ln_bias, eps):
    gamma, beta = ln_scale[:, None], ln_bias[:, None]
    _, _, g = _learn(k, v, w, bias, gamma, beta, eps)
    y_hat = _read(q, k, lr, pos_scale[: q.shape[2]], w, bias, g, eps)[2]
    weighted = lr[..., None] * g
    return q + gamma * y_hat + beta, _t(k) @ weighted, jnp.sum(weighted, 2, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(eps, every, q, k, v, lr, pos_scale, w, bias, gamma, beta):
    """Whole mini-batches: q, k, v (B, H, n, b, K), lr (B, H, n, b), gamma and beta (H, 1, K).

    Returns the outputs like q, and the last w and bias.
    """
    return _whole_forward(eps, every, q, k, v, lr, pos_scale, w, bias, gamma, beta)[0]


def _whole_forward(eps, every, q, k, v, lr, pos_scale, w, bias, gamma, beta):
    def mini_batch(carry, i):
        w, bias, out = carry
        q_, k_, v_, lr_ = (_cut(x, i) for x in (q, k, v, lr))
        _, _, g = _learn(k_, v_, w, bias, gamma, beta, eps)
        y_hat = _read(q_, k_, lr_, pos_scale, w, bias, g, eps)[2]
        out = _put(out, i, q_ + gamma * y_hat + beta)
        return (*_step(w, bias, k_, pos_scale[-1] * lr_, g), out), None

    def group(carry, numbers):
        return jax.lax.scan(mini_batch, carry, numbers)[0], carry[:2]

    carry, starts = (w, bias, jnp.zeros_like(q)), []
    for groups in _groups(q.shape[2], every):
        carry, start = jax.lax.scan(group, carry, groups)
        starts.append(start)
    w, bias, out = carry
    return (out, w, bias), (q, k, v, lr, pos_scale, starts, gamma, beta)


def _whole_backward(eps, every, saved, cotangents):
    q, k, v, lr, pos_scale, starts, gamma, beta = saved
    d_out, dw, dbias = cotangents
    t_last = pos_scale[-1]

    def rerun(state, i):
        k_, v_, lr_ = (_cut(x, i) for x in (k, v, lr))
        _, _, g = _learn(k_, v_, *state, gamma, beta, eps)
        return _step(*state, k_, t_last * lr_, g), state

    def mini_batch(carry, xs):
        dw, dbias, grads, d_pos, d_gamma, d_beta = carry
        i, (w, bias) = xs
        q_, k_, v_, lr_, do = (_cut(x, i) for x in (q, k, v, lr, d_out))
        x_hat, x_inverse, g = _learn(k_, v_, w, bias, gamma, beta, eps)
        a, e, y_hat, y_inverse = _read(q_, k_, lr_, pos_scale, w, bias, g, eps)

        # Through the readings, and through the step to the next state.
        dzb = _normalise_input_gradient(gamma * do, y_hat, y_inverse)
        dp = -_lower(dzb @ _t(g))
        de, da = dp * a, dp * e
        step = t_last * lr_[..., None]
        m = k_ @ dw + dbias
        mg = jnp.sum(m * g, -1)
        dg = -(_t(e * a) @ dzb) - step * m

        # Through the inner gradient G = J(H; x_hat, sigma), H = gamma R: the derivative of a
        # derivative of LN.
        r = gamma * x_hat + beta - v_ + k_
        h = gamma * r
        slope = _mean(dg * x_hat)
        dh = (dg - _mean(dg) - x_hat * slope) * x_inverse
        dr = gamma * dh
        dx = gamma * dr - x_inverse * (dg * _mean(h * x_hat) + h * slope)
        dz = _normalise_input_gradient(dx, x_hat, x_inverse)
        dz = dz - x_hat * x_inverse * _mean(dg * g)

        dq = do + dzb @ _t(w) + da @ k_
        dk = _t(da) @ q_ - step * (g @ _t(dw)) + dr + dz @ _t(w)
        dlr = jnp.sum(pos_scale[:, None] * de, -2) - t_last * mg
        grads = tuple(_put(x, i, y) for x, y in zip(grads, (dq, dk, -dr, dlr)))
        d_pos = d_pos + jnp.sum(de * lr_[..., None, :], -1)
        d_pos = d_pos.at[..., -1].add(-jnp.sum(mg * lr_, -1))
        d_gamma = d_gamma + do * y_hat + dh * r + dr * x_hat
        d_beta = d_beta + do + dr
        dw = dw + _t(q_) @ dzb + _t(k_) @ dz
        dbias = dbias + jnp.sum(dzb + dz, 2, keepdims=True)
        return (dw, dbias, grads, d_pos, d_gamma, d_beta), None

    def group(carry, xs):
        numbers, start = xs
        states = jax.lax.scan(rerun, start, numbers)[1]
        return jax.lax.scan(mini_batch, carry, (numbers, states), reverse=True)[0], None

    grads = tuple(jnp.zeros_like(x) for x in (q, k, v, lr))
    # Sums over sequences and tokens wait until the end; cut from lr and q, these zeros vary over
    # the same manual mesh axes.
    d_pos = jnp.zeros_like(lr[:, :, 0])
    d_gamma = d_beta = jnp.zeros_like(q[:, :, 0], jnp.float32)
    carry = dw, dbias, grads, d_pos, d_gamma, d_beta
    for groups, start in reversed(list(zip(_groups(q.shape[2], every), starts))):
        carry = jax.lax.scan(group, carry, (groups, start), reverse=True)[0]
    dw, dbias, grads, d_pos, d_gamma, d_beta = carry
    d_gamma, d_beta = (jnp.sum(x, (0, 2))[:, None] for x in (d_gamma, d_beta))
    return (*grads, jnp.sum(d_pos, (0, 1)), dw, dbias, d_gamma, d_beta)


_whole.defvjp(_whole_forward, _whole_backward)


def _step(w, bias, k, rate, g):
    """The state after a mini-batch whose tokens have these learning rates (B, H, b)."""
    step = rate[..., None] * g
    return w - _t(k) @ step, bias - jnp.sum(step, 2, keepdims=True)


def _groups(n, every):
    """Numbers of the mini-batches, (groups, members): the full groups, then what is left."""
    full = n // every * every
    groups = np.arange(full).reshape(-1, every), np.arange(full, n).reshape(1, -1)
    return [x for x in groups if x.size]


def _cut(x, i):
    """Mini-batch i of (B, H, n, b, ...) in float32."""
    return jax.lax.dynamic_index_in_dim(x, i, 2, keepdims=False).astype(jnp.float32)


def _put(x, i, value):
    return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 2)


# The continued path: every sequence stands somewhere inside a mini-batch.


def _one_token(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, eps):
    """T = 1: the primal step, without a mini-batch grid."""
    q, k, v, lr = (x[:, :, 0] for x in (q, k, v, lr))
    valid = valid[:, :1]  # (B, 1)
    q, k, v = (_keep(valid[..., None], x) for x in (q, k, v))
    lr = _keep(valid, lr)
    g = lr[..., None] * inner_gradient(k, v, state.w, state.b, ln_scale, ln_bias, eps)
    w_sum = state.w_sum + k[..., :, None] * g[..., None, :]
    b_sum = state.b_sum + g
    scale = pos_scale[phase][:, None, None]
    w, b = state.w - scale[..., None] * w_sum, state.b - scale * b_sum
    z = jnp.einsum("bhk,bhkj->bhj", q, w) + b
    out = q + ln_scale * _normalise(z, eps)[0] + ln_bias
    last = ((phase == pos_scale.shape[0] - 1) & valid[:, 0])[:, None, None]
    return out[:, :, None], TTTLinearState(
        w=jnp.where(last[..., None], w, state.w),
        b=jnp.where(last, b, state.b),
        w_sum=jnp.where(last[..., None], 0.0, w_sum),
        b_sum=jnp.where(last, 0.0, b_sum),
    )


def _continued(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, eps):
    """Any T: tokens are laid on the mini-batch grid of their own sequence, wherever it stands.

    Slots before a sequence's first and after its last valid token have learning rate 0.
    """
    B, _, T, _ = q.shape
    b = pos_scale.shape[0]
    count = -(-(T + b - 1) // b)
    slot = jnp.arange(count * b)[None] - phase[:, None]  # which token stands in each slot
    token = jnp.clip(slot, 0, T - 1)
    filled = (slot >= 0) & (slot < T) & jnp.take_along_axis(valid, token, 1)

    def lay(x):
        index = token.reshape(B, 1, -1, *(1,) * (x.ndim - 3))
        x = jnp.take_along_axis(x, index, 2)
        x = _keep(filled.reshape(B, 1, -1, *(1,) * (x.ndim - 3)), x)
        return jnp.moveaxis(x.reshape(*x.shape[:2], count, b, *x.shape[3:]), 2, 0)

    finished = jnp.moveaxis(filled.reshape(B, count, b)[:, :, -1], 1, 0)  # (count, B)
    gamma, beta = ln_scale[:, None], ln_bias[:, None]

    def mini_batch(state, xs):
        q, k, v, lr, finished = xs
        bias = state.b[:, :, None]
        _, _, g = _learn(k, v, state.w, bias, gamma, beta, eps)
        # What the mini-batch's earlier tokens have gathered acts like a bias of each reading.
        gathered = pos_scale[:, None] * (q @ state.w_sum + state.b_sum[:, :, None])
        y_hat = _read(q, k, lr, pos_scale, state.w, bias - gathered, g, eps)[2]
        out = q + gamma * y_hat + beta
        weighted = lr[..., None] * g
        w_sum = state.w_sum + _t(k) @ weighted
        b_sum = state.b_sum + jnp.sum(weighted, 2)
        last = finished[:, None, None]
        state = TTTLinearState(
            w=jnp.where(last[..., None], state.w - pos_scale[-1] * w_sum, state.w),
            b=jnp.where(last, state.b - pos_scale[-1] * b_sum, state.b),
            w_sum=jnp.where(last[..., None], 0.0, w_sum),
            b_sum=jnp.where(last, 0.0, b_sum),
        )
        return state, out

    state, out = jax.lax.scan(mini_batch, state, (*map(lay, (q, k, v, lr)), finished))
    out = jnp.moveaxis(out, 0, 2).reshape(*q.shape[:2], count * b, -1)
    back = (jnp.arange(T)[None] + phase[:, None])[:, None, :, None]
    return jnp.take_along_axis(out, back, 2), state


def _mean(x):
    return jnp.mean(x, -1, keepdims=True)


def _normalise(z, eps):
    """Like `norm.normalise`, with 1 / sigma."""
    centred = z - _mean(z)
    inverse = jax.lax.rsqrt(_mean(centred * centred) + eps)
    return centred * inverse, inverse


def _normalise_input_gradient(g, x_hat, inverse):
    """Like `norm.normalise_input_gradient`, given 1 / sigma."""
    return (g - _mean(g) - x_hat * _mean(g * x_hat)) * inverse


def _t(x):
    return jnp.swapaxes(x, -1, -2)


def _lower(x):
    """Zeroes what lies above the diagonal."""
    i = jnp.arange(x.shape[-1])
    return jnp.where(i[:, None] >= i, x, 0.0)


def _keep(mask, x):
    """x where mask, else 0: garbage, NaN included, cannot get through."""
    return jnp.where(mask, x, 0.0)
