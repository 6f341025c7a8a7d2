# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear in dual form: mini-batches as matrix products, with a backward pass of its own.

Per mini-batch of b tokens, with the state (W, b) at its start and Am = mask(1 + Q K^T):

    Z = K W + b;  Xh, s = LN(Z);  R = gamma Xh + lambda - V + K;  G = J(gamma R; Xh, s)
    Zb = Q W + b - (t_i l_j Am) G;   O = Q + gamma LN(Zb) + lambda
    W <- W - t_last K^T diag(l) G;   b <- b - t_last l G

Only Z, G and the new state wait for the mini-batch before; all that concerns Q runs for a whole
group of mini-batches at once. The forward pass stores the state once per group, the backward pass
walks the groups in reverse, reruns the sequential part of each and goes back through it.

Letters: N groups, M mini-batches in a group, B batch, H heads, b tokens in a mini-batch, K head
width. Arrays inside have the layout (M, B, H, b, K) and are float32.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_linear.reference import (
    inner_gradient,
    normalise,
    normalise_input_gradient,
)
from pallas_kernels.ttt_linear.state import TTTLinearState


def ttt_linear_xla(
    q, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, phase, valid, eps, checkpoint_every
):
    """See `api.ttt_linear`; all inputs float32."""
    if phase is None and valid is None:
        return _aligned(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, eps, checkpoint_every)
    B, _, T, _ = q.shape
    phase = jnp.zeros((B,), jnp.int32) if phase is None else phase
    valid = jnp.ones((B, T), bool) if valid is None else valid
    one = T == 1
    run = _one_token if one else _continued
    return run(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, eps)


# The aligned path: every sequence stands at the start of a mini-batch.


def _aligned(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, eps, group):
    B, H, T, K = q.shape
    b = pos_scale.shape[0]
    whole = T // b * b
    w, bias, outputs = state.w, state.b, []
    if whole:
        M = min(group, whole // b)
        pieces = [_grouped(x[:, :, :whole], b, M) for x in (q, k, v, lr)]
        out, w, bias = _groups(eps, *pieces, pos_scale, w, bias, ln_scale, ln_bias)
        out = out.reshape(-1, *out.shape[2:])[: whole // b]
        outputs.append(jnp.moveaxis(out, 0, 2).reshape(B, H, whole, K))
    w_sum, b_sum = jnp.zeros_like(w), jnp.zeros_like(bias)
    if whole < T:
        rest = (x[:, :, whole:] for x in (q, k, v, lr))
        out, w_sum, b_sum = _partial(*rest, pos_scale, w, bias, ln_scale, ln_bias, eps)
        outputs.append(out)
    out = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, 2)
    return out, TTTLinearState(w=w, b=bias, w_sum=w_sum, b_sum=b_sum)


def _grouped(x, b, M):
    """(B, H, n b, ...) -> (N, M, B, H, b, ...); zeros fill the last group and change no state."""
    B, H, T = x.shape[:3]
    n = T // b
    x = jnp.moveaxis(x.reshape(B, H, n, b, *x.shape[3:]), 2, 0)
    x = jnp.pad(x, [(0, -n % M)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, M, *x.shape[1:])


def _partial(q, k, v, lr, pos_scale, w, bias, ln_scale, ln_bias, eps):
    """The first r < b tokens of a mini-batch: outputs and running sums; the state stays."""
    gamma, beta = ln_scale[:, None], ln_bias[:, None]
    x_hat, sigma = normalise(k @ w + bias[:, :, None], eps)
    g = normalise_input_gradient(gamma * (gamma * x_hat + beta - v + k), x_hat, sigma)
    scale = pos_scale[: q.shape[2], None] * lr[:, :, None]
    z = q @ w + bias[:, :, None] - (scale * _lower(1 + q @ _t(k))) @ g
    out = q + gamma * normalise(z, eps)[0] + beta
    weighted = lr[..., None] * g
    return out, _t(k) @ weighted, jnp.sum(weighted, 2)


def _sequential(eps, k, v, lr, pos_scale, w, bias, ln_scale, ln_bias):
    """What must go mini-batch by mini-batch: the inner gradients and the states of one group."""
    gamma, beta = ln_scale[:, None], ln_bias[:, None]

    def mini_batch(carry, xs):
        w, bias = carry
        k, v, lr = xs
        x_hat, sigma = normalise(k @ w + bias[:, :, None], eps)
        g = normalise_input_gradient(gamma * (gamma * x_hat + beta - v + k), x_hat, sigma)
        step = (pos_scale[-1] * lr)[..., None] * g
        return (w - _t(k) @ step, bias - jnp.sum(step, 2)), (w, bias, x_hat, sigma, g)

    return jax.lax.scan(mini_batch, (w, bias), (k, v, lr))


def _reading(eps, q, k, lr, pos_scale, starts, g):
    """Mask products, LN of the readings of a whole group, given its start states and gradients."""
    w, bias = starts
    a = _lower(1 + q @ _t(k))
    p = pos_scale[:, None] * lr[..., None, :] * a
    y_hat, sigma = normalise(q @ w + bias[..., None, :] - p @ g, eps)
    return a, p, y_hat, sigma


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _groups(eps, q, k, v, lr, pos_scale, w, bias, ln_scale, ln_bias):
    """q, k, v (N, M, B, H, b, K), lr (N, M, B, H, b) -> out like q, final w and bias."""
    return _groups_forward(eps, q, k, v, lr, pos_scale, w, bias, ln_scale, ln_bias)[0]


def _groups_forward(eps, q, k, v, lr, pos_scale, w, bias, ln_scale, ln_bias):
    def group(carry, xs):
        q, k, v, lr = xs
        end, (w, bias, _, _, g) = _sequential(eps, k, v, lr, pos_scale, *carry, ln_scale, ln_bias)
        _, _, y_hat, _ = _reading(eps, q, k, lr, pos_scale, (w, bias), g)
        return end, (q + ln_scale[:, None] * y_hat + ln_bias[:, None], carry)

    (w_end, bias_end), (out, starts) = jax.lax.scan(group, (w, bias), (q, k, v, lr))
    saved = (q, k, v, lr, pos_scale, starts, ln_scale, ln_bias)
    return (out, w_end, bias_end), saved


def _groups_backward(eps, saved, cotangents):
    q, k, v, lr, pos_scale, starts, ln_scale, ln_bias = saved
    d_out, dw, dbias = cotangents
    gamma, beta = ln_scale[:, None], ln_bias[:, None]
    t_last = pos_scale[-1]

    def group(carry, xs):
        dw, dbias, d_pos, d_gamma, d_beta = carry
        q, k, v, lr, start, d_out = xs
        _, (w, bias, x_hat, sigma, g) = _sequential(
            eps, k, v, lr, pos_scale, *start, ln_scale, ln_bias
        )
        a, p, y_hat, y_sigma = _reading(eps, q, k, lr, pos_scale, (w, bias), g)

        # Through the readings, the whole group at once.
        d_gamma = d_gamma + jnp.sum(d_out * y_hat, (0, 3))
        d_beta = d_beta + jnp.sum(d_out, (0, 3))
        dz = normalise_input_gradient(gamma * d_out, y_hat, y_sigma)
        dp = -_lower(dz @ _t(g))
        de = dp * a
        da = dp * (pos_scale[:, None] * lr[..., None, :])
        dq = d_out + dz @ _t(w) + da @ k
        dk = _t(da) @ q
        dg_read = -_t(p) @ dz
        dw_read, dbias_read = _t(q) @ dz, jnp.sum(dz, 3)

        # Through the states and inner gradients, last mini-batch first.
        def mini_batch(carry, xs):
            dw, dbias = carry
            k, v, lr, x_hat, sigma, g, dg, dw_read, dbias_read = xs
            e = (t_last * lr)[..., None]
            m = k @ dw + dbias[:, :, None]
            dg = dg - e * m
            dk = -e * (g @ _t(dw))
            residual = gamma * x_hat + beta - v + k
            h = gamma * residual
            dh = normalise_input_gradient(dg, x_hat, sigma)
            dr = gamma * dh
            u = dg / sigma
            mean = lambda x: jnp.mean(x, -1, keepdims=True)
            dx = gamma * dr - u * mean(h * x_hat) - h * mean(u * x_hat)
            dsigma = -jnp.sum(dg * g, -1, keepdims=True) / sigma
            dz = normalise_input_gradient(dx, x_hat, sigma) + dsigma * x_hat / x_hat.shape[-1]
            dw = dw + dw_read + _t(k) @ dz
            dbias = dbias + dbias_read + jnp.sum(dz, 2)
            scale = (jnp.sum(dh * residual + dr * x_hat, 2), jnp.sum(dr, 2))
            return (dw, dbias), (dk + dr, -dr, dz, jnp.sum(m * g, -1), scale)

        xs = (k, v, lr, x_hat, sigma, g, dg_read, dw_read, dbias_read)
        (dw, dbias), (dk_seq, dv, dz_seq, mg, (d_gamma_seq, d_beta_seq)) = jax.lax.scan(
            mini_batch, (dw, dbias), xs, reverse=True
        )
        dk = dk + dk_seq + dz_seq @ _t(w)
        d_gamma = d_gamma + jnp.sum(d_gamma_seq, 0)
        d_beta = d_beta + jnp.sum(d_beta_seq, 0)
        dlr = jnp.einsum("...ij,i->...j", de, pos_scale) - t_last * mg
        d_pos = d_pos + jnp.einsum("m...ij,m...j->...i", de, lr)
        d_pos = d_pos.at[..., -1].add(-jnp.sum(mg * lr, (0, -1)))
        return (dw, dbias, d_pos, d_gamma, d_beta), (dq, dk, dv, dlr)

    B, H = dbias.shape[:2]
    zeros = jnp.zeros_like(dbias)
    # Zeros made of the data, so that they vary over the same manual mesh axes.
    d_pos = jnp.zeros((B, H, pos_scale.shape[0]), jnp.float32) + 0 * dbias[..., :1]
    carry, grads = jax.lax.scan(
        group, (dw, dbias, d_pos, zeros, zeros), (q, k, v, lr, starts, d_out), reverse=True
    )
    dw, dbias, d_pos, d_gamma, d_beta = carry
    return (*grads, jnp.sum(d_pos, (0, 1)), dw, dbias, jnp.sum(d_gamma, 0), jnp.sum(d_beta, 0))


_groups.defvjp(_groups_forward, _groups_backward)


# The continued path: every sequence stands somewhere inside a mini-batch.


def _one_token(q, k, v, lr, pos_scale, state, ln_scale, ln_bias, phase, valid, eps):
    """T = 1: the primal step, without a mini-batch grid."""
    q, k, v, lr = (x[:, :, 0] for x in (q, k, v, lr))
    valid = valid[:, :1]  # (B, 1)
    k, v, lr = _keep(valid[..., None], k), _keep(valid[..., None], v), _keep(valid, lr)
    g = lr[..., None] * inner_gradient(k, v, state.w, state.b, ln_scale, ln_bias, eps)
    w_sum = state.w_sum + k[..., :, None] * g[..., None, :]
    b_sum = state.b_sum + g
    scale = pos_scale[phase][:, None, None]
    w, b = state.w - scale[..., None] * w_sum, state.b - scale * b_sum
    z = jnp.einsum("bhk,bhkj->bhj", q, w) + b
    out = q + ln_scale * normalise(z, eps)[0] + ln_bias
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
        x_hat, sigma = normalise(k @ state.w + bias, eps)
        g = normalise_input_gradient(gamma * (gamma * x_hat + beta - v + k), x_hat, sigma)
        gathered = q @ state.w_sum + state.b_sum[:, :, None]
        p = pos_scale[:, None] * lr[:, :, None] * _lower(1 + q @ _t(k))
        z = q @ state.w + bias - p @ g - pos_scale[:, None] * gathered
        out = q + gamma * normalise(z, eps)[0] + beta
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


def _t(x):
    return jnp.swapaxes(x, -1, -2)


def _lower(x):
    """Zeroes what lies above the diagonal."""
    i = jnp.arange(x.shape[-1])
    return jnp.where(i[:, None] >= i, x, 0.0)


def _keep(mask, x):
    """x where mask, else 0: garbage, NaN included, cannot get through."""
    return jnp.where(mask, x, 0.0)
