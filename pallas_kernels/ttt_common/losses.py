# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""How well the inner model knows what it reads: for looking on, not part of any training loss."""

import jax
import jax.numpy as jnp

from pallas_kernels.ttt_common import choice
from pallas_kernels.varying import match_varying


def losses(package, k, v, lr, pos_scale, state, ln_scale, ln_bias, *, eps):
    """See `inner_losses` of an operation."""
    T, b = k.shape[2], pos_scale.shape[0]
    xla = choice.load(package, "xla")
    arrays = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), (k, v, lr, pos_scale, state, ln_scale, ln_bias)
    )
    k, v, lr, pos_scale, state, ln_scale, ln_bias = match_varying(arrays)
    norm = ln_scale[:, None], ln_bias[:, None]
    first = tuple(state[: len(state) // 2])

    def mini_batch(weights, xs):
        k, v, lr = xs
        sums = xla.learn(k, v, lr, weights, *norm, eps)
        after = tuple(x - pos_scale[-1] * y for x, y in zip(weights, sums))
        error = lambda w: xla.predict(k[:, :, -1:], w, *norm, eps)[:, :, 0] - v[:, :, -1]
        return after, tuple(jnp.mean(jnp.square(error(w)), -1) for w in (first, weights, after))

    def split(x):
        whole = x[:, :, : T // b * b]
        return jnp.moveaxis(whole.reshape(*x.shape[:2], T // b, b, *x.shape[3:]), 2, 0)

    _, found = jax.lax.scan(mini_batch, first, tuple(map(split, (k, v, lr))))
    return dict(zip(("initial", "before", "after"), (jnp.moveaxis(x, 0, 2) for x in found)))
