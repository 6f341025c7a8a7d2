# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The dual form over a sequence: one mini-batch after another, with a backward pass of its own.

What an operation computes in one mini-batch comes as three functions, all float32:

    read(q, k, v, lr, pos_scale, weights, gamma, beta, eps, gathered=None) -> (out, sums)
    learn(k, v, lr, weights, gamma, beta, eps) -> sums
    back(q, k, v, lr, pos_scale, weights, gamma, beta, eps, d_out, d_weights)
        -> (dq, dk, dv, dlr), d_weights, (d_pos_scale, d_gamma, d_beta)

`sums` is what the tokens have gathered, sum_j lr_j k_j^T g_j for a weight, one array for each of
`weights`; the next weights are weights - pos_scale[-1] sums. `gathered` are the sums of earlier
tokens of the same mini-batch. The last cotangents are per sequence and head, those of gamma and
beta per token too.

The forward pass keeps the weights at the start of every `every`-th mini-batch, besides its inputs
in their own dtype. The backward pass walks those groups in reverse: it reruns the weights of one
group, then goes back through its mini-batches, each from its inputs and its weights alone.

A mini-batch is cut out of the arrays where it is needed and its results are written in place: with
the mini-batches moved to the front for `scan`, each pass would first copy everything.

Letters: B batch, H heads, T tokens, n mini-batches, b tokens in a mini-batch, K head width,
G = ceil(n / every) groups.
"""

import jax
import jax.numpy as jnp
import numpy as np


def forward(read, q, k, v, lr, pos_scale, weights, gamma, beta, *, eps, every, reset=None):
    """T = n b tokens: q, k, v (B, H, T, K), lr (B, H, T), reset (B, n) or None.

    Returns out like q, the last weights, and those at the start of each group, (G, B, H, ...).
    """
    T, b = q.shape[2], pos_scale.shape[0]
    tokens = tuple(_grid(x, b) for x in (q, k, v, lr))
    first = weights

    def mini_batch(carry, i):
        weights, out = carry
        weights = restart(reset, i, first, weights)
        cut = (_cut(x, i) for x in tokens)
        new, sums = read(*cut, pos_scale, weights, gamma[:, None], beta[:, None], eps)
        return (_step(weights, sums, pos_scale), _put(out, i, new)), None

    def group(carry, numbers):
        return jax.lax.scan(mini_batch, carry, numbers)[0], carry[0]

    carry, starts = (weights, jnp.zeros_like(tokens[0])), []
    for numbers in _groups(T // b, every):
        carry, start = jax.lax.scan(group, carry, numbers)
        starts.append(start)
    weights, out = carry
    return out.reshape(q.shape), weights, _join(starts)


def backward(
    learn,
    back,
    q,
    k,
    v,
    lr,
    pos_scale,
    starts,
    gamma,
    beta,
    d_out,
    d_weights,
    *,
    eps,
    every,
    reset=None,
):
    """Cotangents of q, k, v, lr, pos_scale, the first weights, gamma and beta."""
    T, b = q.shape[2], pos_scale.shape[0]
    q, k, v, lr, d_out = (_grid(x, b) for x in (q, k, v, lr, d_out))
    norm = gamma[:, None], beta[:, None]
    first = tuple(x[0] for x in starts)

    def rerun(carry, i):
        weights, stored, at = carry
        weights = restart(reset, i, first, weights)
        sums = learn(*(_cut(x, i) for x in (k, v, lr)), weights, *norm, eps)
        weights = _step(weights, sums, pos_scale)
        stored = tuple(_put(x, at + 1, y, 0) for x, y in zip(stored, weights))
        return (weights, stored, at + 1), None

    def mini_batch(carry, xs):
        d_weights, d_first, grads, shared, stored = carry
        i, at = xs
        weights = restart(reset, i, first, tuple(_cut(x, at, 0) for x in stored))
        cut = (_cut(x, i) for x in (q, k, v, lr))
        new, d_weights, more = back(*cut, pos_scale, weights, *norm, eps, _cut(d_out, i), d_weights)
        grads = tuple(_put(x, i, y) for x, y in zip(grads, new))
        shared = tuple(x + y for x, y in zip(shared, more))
        if reset is not None:
            # What came before a restart gets nothing; the given weights get it all.
            d_first = tuple(x + _keep(reset[:, i], y) for x, y in zip(d_first, d_weights))
            d_weights = tuple(_keep(~reset[:, i], y) for y in d_weights)
        return (d_weights, d_first, grads, shared, stored), None

    def group(carry, xs):
        numbers, start = xs
        *carry, stored = carry
        stored = tuple(_put(x, 0, y, 0) for x, y in zip(stored, start))
        _, stored, _ = jax.lax.scan(rerun, (start, stored, 0), numbers[:-1])[0]
        xs = numbers, np.arange(len(numbers))
        return jax.lax.scan(mini_batch, (*carry, stored), xs, reverse=True)[0], None

    grads = tuple(jnp.zeros_like(x) for x in (q, k, v, lr))
    # Sums over sequences and tokens wait until the end; cut from lr and q, these zeros vary over
    # the same manual mesh axes.
    shared = (jnp.zeros_like(lr[:, :, 0]), *(jnp.zeros_like(q[:, :, 0], jnp.float32),) * 2)
    d_first = () if reset is None else tuple(jnp.zeros_like(x) for x in d_weights)
    # The weights of one group: room that is taken once, and written in place.
    stored = tuple(jnp.broadcast_to(x[:1], (min(every, T // b), *x.shape[1:])) for x in starts)
    carry, done = (d_weights, d_first, grads, shared, stored), T // b
    for numbers in reversed(_groups(T // b, every)):
        done -= numbers.size
        start = tuple(x[done // every :][: len(numbers)] for x in starts)
        carry = jax.lax.scan(group, carry, (numbers, start), reverse=True)[0]
    d_weights, d_first, grads, (d_pos, d_gamma, d_beta), _ = carry
    if reset is not None:
        d_weights = tuple(x + y for x, y in zip(d_weights, d_first))
    *grads, dlr = (x.reshape(*x.shape[:2], T, *x.shape[4:]) for x in grads)
    d_gamma, d_beta = (jnp.sum(x, (0, 2)) for x in (d_gamma, d_beta))
    return (*grads, dlr, jnp.sum(d_pos, (0, 1)), d_weights, d_gamma, d_beta)


def restart(reset, i, first, weights):
    """The weights that mini-batch i begins with."""
    if reset is None:
        return weights
    return tuple(jnp.where(like(reset[:, i], x), x, y) for x, y in zip(first, weights))


def like(rows, x):
    """(B,) with axes of size 1, so that it broadcasts against x (B, ...)."""
    return rows.reshape(-1, *(1,) * (x.ndim - 1))


def _keep(rows, x):
    return jnp.where(like(rows, x), x, 0.0)


def _step(weights, sums, pos_scale):
    return tuple(x - pos_scale[-1] * y for x, y in zip(weights, sums))


def _groups(n, every):
    """Numbers of the mini-batches, (groups, members): the full groups, then what is left."""
    full = n // every * every
    groups = np.arange(full).reshape(-1, every), np.arange(full, n).reshape(1, -1)
    return [x for x in groups if x.size]


def _join(starts):
    if len(starts) == 1:
        return starts[0]
    return tuple(jnp.concatenate(pieces) for pieces in zip(*starts))


def _grid(x, b):
    """(B, H, T, ...) -> (B, H, n, b, ...)."""
    return x.reshape(*x.shape[:2], -1, b, *x.shape[3:])


def _cut(x, i, axis=2):
    """Mini-batch i, of (B, H, n, b, ...) if nothing else is said, in float32."""
    return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False).astype(jnp.float32)


def _put(x, i, value, axis=2):
    return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, axis)
