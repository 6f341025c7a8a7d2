# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Evaluation: the loss of every weighted token once, whatever the batch size, the padding or the
mesh.

    loss = sum(w * nll) / sum(w)      perplexity = exp(loss)      bits per byte = sum(w * nll) / (ln
    2 * bytes)
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from train.errors import UserError
from train.mesh import to_global


class EvaluationStopped(Exception):
    """`should_stop` became true before the end."""


def evaluate(
    eval_step: Callable,
    params: Any,
    validation: Any,
    sharding: jax.sharding.NamedSharding,
    *,
    rows: int,
    batches: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """The token-weighted loss over validation data.

    Args:
      eval_step: (params, batch) -> sums of weighted nll, of the weights that count and of all
        weights, see `train.step.make_eval_step`.
      validation: from `train.data.open_validation`; its last batch is padded with weight 0.
      sharding: of the batch, from `make_eval_step`.
      rows: rows per batch.
      batches: how many batches to read, spread over the data; None reads all.
      should_stop: asked between batches; once it is true EvaluationStopped is raised.

    Returns:
      loss (nats per token that counts), perplexity, bits_per_byte, and tokens (all that were read).
    """
    nll = weight = tokens = 0.0
    pending: list = []

    def collect(keep: int) -> None:
        nonlocal nll, weight, tokens
        while len(pending) > keep:
            sums = map(float, jax.device_get(pending.pop(0)))  # summed on in float64
            nll, weight, tokens = (a + b for a, b in zip((nll, weight, tokens), sums))

    for batch in validation.spread(len(validation) if batches is None else batches):
        if should_stop():
            raise EvaluationStopped
        pending.append(eval_step(params, to_global(batch, sharding, rows)))
        collect(keep=2)
    collect(keep=0)
    if not weight:
        raise UserError("The validation data hold no token to predict. Give a longer text.")
    loss = nll / weight
    num_bytes = validation.num_bytes * (tokens / validation.num_tokens)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / (math.log(2) * num_bytes),
        "tokens": tokens,
    }
