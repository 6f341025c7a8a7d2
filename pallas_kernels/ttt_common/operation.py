# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""From a public call to its implementation; see the `api` of an operation for the arguments.

The aligned path (every sequence stands at the start of a mini-batch) runs whole mini-batches
through an implementation's `forward` and `backward`, and a partial last one through `read` of
"xla". The continued path (anywhere inside a mini-batch, with tokens that do not count) takes one
token at a time through `one_token`, and more through `read` on a grid of their own.

Letters: B batch, H heads, T tokens, K head width, b inner mini-batch.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_common import choice
from pallas_kernels.ttt_common.reference import token_by_token
from pallas_kernels.ttt_common.scan import like, restart
from pallas_kernels.varying import match_varying


class Setup(NamedTuple):
    """What does not change while a program runs."""

    package: str
    """The operation, such as "pallas_kernels.ttt_linear"."""
    implementation: str | None
    sizes: tuple
    """K, b, F and the dtype of q, k and v."""
    eps: float
    every: int
    """Mini-batches between the states that the forward pass keeps."""


def run(
    package, F, q, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, phase, valid, reset, eps,
    checkpoint_every, implementation,
):  # fmt: skip
    """Checked arguments of the public call; F is the inner hidden width, or None."""
    T, K = q.shape[2:]
    continued = phase is not None or valid is not None
    dtype = jnp.result_type(q, k, v)
    sizes = (K, pos_scale.shape[0], F, dtype)
    refused = None
    if reset is not None:
        refused = "reset restarts sequences, which kernels do not"
    elif continued and T > 1:
        refused = "with phase or valid, kernels take one token at a time (T = 1)"
    choice.check(package, implementation, sizes, refused)
    if refused and implementation is None:
        implementation = "xla"
    setup = Setup(package, implementation, sizes, eps, checkpoint_every)

    # q, k and v stay as they are: the backward pass keeps them, and bfloat16 takes half the room.
    tokens = tuple(jnp.asarray(x, dtype) for x in (q, k, v))
    rest = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), (lr, pos_scale, state, ln_scale, ln_bias)
    )
    arrays, phase, valid, reset = match_varying((tokens + rest, phase, valid, reset))
    if not continued and implementation != "reference":
        out, state = _aligned(setup, *arrays, reset)
        return out.astype(q.dtype), state
    phase = jnp.zeros_like(arrays[3][:, 0, 0], jnp.int32) if phase is None else phase
    valid = jnp.ones_like(arrays[3][:, 0], bool) if valid is None else valid
    if implementation == "reference":
        one_token = choice.load(package, "reference").one_token
        out, state = token_by_token(
            one_token, *arrays, phase=phase, valid=valid, reset=reset, eps=eps
        )
    elif T == 1:
        out, state = _single(setup, *arrays, phase, valid)
    else:
        out, state = _continued(setup, *arrays, phase, valid)
    return out.astype(q.dtype), state


# The aligned path.


def _aligned(setup, q, k, v, lr, pos_scale, state, gamma, beta, reset):
    T, b = q.shape[2], pos_scale.shape[0]
    whole = T // b * b
    first = weights = state[: len(state) // 2]
    sums, outputs = tuple(jnp.zeros_like(x) for x in weights), []
    if whole:
        tokens = (x[:, :, :whole] for x in (q, k, v, lr))
        starts = None if reset is None else reset[:, : whole // b]
        out, weights = _whole(setup, *tokens, pos_scale, weights, gamma, beta, starts)
        outputs.append(out)
    if whole < T:
        # The first tokens of a mini-batch: outputs and running sums; the weights stay.
        weights = restart(reset, -1, first, weights)
        tokens = (x[:, :, whole:].astype(jnp.float32) for x in (q, k, v, lr))
        norm = gamma[:, None], beta[:, None]
        out, sums = choice.load(setup.package, "xla").read(
            *tokens, pos_scale[: T - whole], weights, *norm, setup.eps
        )
        outputs.append(out.astype(q.dtype))
    out = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, 2)
    return out, type(state)(*weights, *sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(setup, q, k, v, lr, pos_scale, weights, gamma, beta, reset):
    """Whole mini-batches: the outputs like q, and the last weights."""
    return _whole_forward(setup, q, k, v, lr, pos_scale, weights, gamma, beta, reset)[0]


def _whole_forward(setup, q, k, v, lr, pos_scale, weights, gamma, beta, reset):
    arrays = q, k, v, lr, pos_scale, weights, gamma, beta
    out, weights, starts = _dispatch(setup, "forward", arrays, reset)
    return (out, weights), (q, k, v, lr, pos_scale, starts, gamma, beta, reset)


def _whole_backward(setup, saved, cotangents):
    *saved, reset = saved
    return *_dispatch(setup, "backward", (*saved, *cotangents), reset), None


_whole.defvjp(_whole_forward, _whole_backward)


def _dispatch(setup, function, arrays, reset):
    options = dict(eps=setup.eps, every=setup.every)
    if reset is not None:
        return getattr(choice.load(setup.package, "xla"), function)(*arrays, **options, reset=reset)
    return choice.dispatch(
        setup.package, setup.implementation, function, setup.sizes, *arrays, **options
    )


# The continued path.


def _single(setup, q, k, v, lr, pos_scale, state, gamma, beta, phase, valid):
    """T = 1: the primal step, without a grid of mini-batches."""
    valid = valid[:, 0]
    tokens = (x[:, :, 0].astype(jnp.float32) for x in (q, k, v))
    q, k, v, lr = (_keep(valid, x) for x in (*tokens, lr[:, :, 0]))
    last = (phase == pos_scale.shape[0] - 1) & valid
    out, state = _one_token(setup, q, k, v, lr, pos_scale[phase], last, state, gamma, beta)
    return _keep(valid, out)[:, :, None], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_token(setup, *args):
    return choice.dispatch(
        setup.package, setup.implementation, "one_token", setup.sizes, *args, eps=setup.eps
    )


def _one_token_forward(setup, *args):
    return _one_token(setup, *args), args


def _one_token_backward(setup, args, cotangents):
    # JAX differentiates the step of "xla", whichever ran: decoding is rarely trained through.
    *before, last, state, gamma, beta = args
    one_token = choice.load(setup.package, "xla").one_token

    def step(before, *rest):
        return one_token(*before, last, *rest, eps=setup.eps)

    before, *rest = jax.vjp(step, before, state, gamma, beta)[1](cotangents)
    return *before, None, *rest


_one_token.defvjp(_one_token_forward, _one_token_backward)


def _continued(setup, q, k, v, lr, pos_scale, state, gamma, beta, phase, valid):
    """Any T: the valid tokens of each sequence are laid on its own grid of mini-batches, wherever
    it stands in it. Empty slots have learning rate 0.
    """
    B, H, T, K = q.shape
    b = pos_scale.shape[0]
    n = -(-(T + b - 1) // b)
    order = jnp.argsort(~valid, 1, stable=True)  # the valid tokens first
    rank = jnp.arange(n * b)[None] - phase[:, None]  # which of them stands in each slot
    filled = (rank >= 0) & (rank < jnp.sum(valid, 1, keepdims=True))
    token = jnp.take_along_axis(order, jnp.clip(rank, 0, T - 1), 1)

    def lay(x):
        x = jnp.take_along_axis(x, _spread(token, x), 2)
        x = jnp.where(_spread(filled, x), x, 0)
        return jnp.moveaxis(x.reshape(B, H, n, b, *x.shape[3:]), 2, 0)

    read = choice.load(setup.package, "xla").read
    tokens = tuple(lay(x) for x in (q, k, v, lr))
    ends = jnp.moveaxis(filled.reshape(B, n, b)[:, :, -1], 1, 0)  # (n, B): finished mini-batches

    def mini_batch(state, xs):
        *tokens, ends = xs
        m = len(state) // 2
        weights, sums = state[:m], state[m:]
        q, k, v, lr = (x.astype(jnp.float32) for x in tokens)
        norm = gamma[:, None], beta[:, None]
        out, more = read(q, k, v, lr, pos_scale, weights, *norm, setup.eps, gathered=sums)
        sums = tuple(x + y for x, y in zip(sums, more))
        next_ = tuple(x - pos_scale[-1] * y for x, y in zip(weights, sums))
        weights = (jnp.where(like(ends, x), y, x) for x, y in zip(weights, next_))
        sums = (jnp.where(like(ends, x), 0.0, x) for x in sums)
        return type(state)(*weights, *sums), out

    state, out = _scan_in_groups(mini_batch, state, (*tokens, ends), setup.every)
    out = jnp.moveaxis(out, 0, 2).reshape(B, H, n * b, K)
    slot = jnp.clip(phase[:, None] + jnp.cumsum(valid, 1) - 1, 0, n * b - 1)
    out = jnp.take_along_axis(out, _spread(slot, out), 2)
    return jnp.where(_spread(valid, out), out, 0), state


def _scan_in_groups(body, carry, xs, every):
    """`jax.lax.scan`, which a derivative reruns in groups of `every`."""
    n = len(xs[0])
    full = n // every * every
    group = jax.checkpoint(lambda carry, xs: jax.lax.scan(body, carry, xs))
    ys = []
    if full:
        grouped = jax.tree.map(lambda x: x[:full].reshape(-1, every, *x.shape[1:]), xs)
        carry, y = jax.lax.scan(group, carry, grouped)
        ys.append(y.reshape(full, *y.shape[2:]))
    if full < n:
        carry, y = group(carry, jax.tree.map(lambda x: x[full:], xs))
        ys.append(y)
    return carry, jnp.concatenate(ys)


def _spread(per_token, x):
    """(B, T) with axes of size 1, so that it broadcasts against x (B, H, T, ...)."""
    return per_token.reshape(len(per_token), 1, -1, *(1,) * (x.ndim - 3))


def _keep(rows, x):
    return jnp.where(like(rows, x), x, 0.0)
