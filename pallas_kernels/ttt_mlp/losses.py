# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The losses of the inner model along a sequence."""

import jax

from pallas_kernels.ttt_common.losses import losses
from pallas_kernels.ttt_mlp.state import TTTMLPState


def inner_losses(
    k: jax.Array,
    v: jax.Array,
    lr: jax.Array,
    pos_scale: jax.Array,
    state: TTTMLPState,
    ln_scale: jax.Array,
    ln_bias: jax.Array,
    *,
    eps: float = 1e-6,
) -> dict[str, jax.Array]:
    """The error of f at the last token of each whole mini-batch, under three states.

    Arguments as for `ttt_mlp`, from the start of a mini-batch. Returns the mean over K of
    |f(k) - v|^2, (B, H, n) float32 each, under the given weights (`initial`), those that the
    mini-batch begins with (`before`) and those that it leaves (`after`). Costs about a forward
    pass. Source: official JAX code, `output_ttt_stats`.
    """
    return losses("pallas_kernels.ttt_mlp", k, v, lr, pos_scale, state, ln_scale, ln_bias, eps=eps)
