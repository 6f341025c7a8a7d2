# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Both TTT operations behind one call, and random arguments for them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import ttt_linear, ttt_mlp


class Op(NamedTuple):
    call: Callable
    State: type
    losses: Callable
    weights: Callable
    """(K, F) -> shapes per sequence and head."""


OPS = {
    "linear": Op(
        ttt_linear.ttt_linear,
        ttt_linear.TTTLinearState,
        ttt_linear.inner_losses,
        lambda K, F: ((K, K), (K,)),
    ),
    "mlp": Op(
        ttt_mlp.ttt_mlp,
        ttt_mlp.TTTMLPState,
        ttt_mlp.inner_losses,
        lambda K, F: ((K, F), (F,), (F, K), (K,)),
    ),
}


def arrays(op, B, H, T, K, size, *, F=None, dtype="float32", seed=0):
    """Arguments by name; `weights` is a tuple, one array per sequence each."""
    # numpy's generator, because each shape of jax.random would be compiled.
    draw = np.random.default_rng(seed).standard_normal
    normal = lambda *shape: jnp.asarray(draw(shape, np.float32))
    shapes = OPS[op].weights(K, F or 2 * K)
    lr = np.float32(1) / (1 + np.exp(draw((B, H, T), np.float32))) / np.float32(K)
    return {
        "q": normal(B, H, T, K).astype(dtype),
        "k": normal(B, H, T, K).astype(dtype),
        "v": normal(B, H, T, K).astype(dtype),
        "lr": jnp.asarray(lr),
        "pos_scale": 1 / jnp.arange(1, size + 1, dtype=jnp.float32) + 0.05 * normal(size),
        "weights": tuple(0.1 * normal(B, H, *shape) for shape in shapes),
        "ln_scale": 1 + 0.2 * normal(H, K),
        "ln_bias": 0.2 * normal(H, K),
    }


def start(op, weights, sums=None):
    """The state with these weights, and no running sums if none are given."""
    sums = tuple(map(jnp.zeros_like, weights)) if sums is None else sums
    return OPS[op].State(*weights, *sums)


def run(op, inputs, sums=None, **options):
    """The operation on arguments like those of `arrays`."""
    tokens = (inputs[name] for name in ("q", "k", "v", "lr", "pos_scale"))
    state = start(op, inputs["weights"], sums)
    return OPS[op].call(*tokens, state, inputs["ln_scale"], inputs["ln_bias"], **options)


def cut(inputs, a, b):
    """Tokens a to b."""
    return inputs | {name: inputs[name][:, :, a:b] for name in ("q", "k", "v", "lr")}
