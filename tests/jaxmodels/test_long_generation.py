# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""A TTT model writes twenty thousand tokens in the memory that it needs for a hundred."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import tiny

import jaxmodels
from jaxmodels.generate import _generate

LENGTH = 20_000
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 2], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["ttt_linear", "ttt_mlp_mamba"])
def test_twenty_thousand_tokens(mixer):
    model, params = tiny(mixer, num_layers=2)
    new = np.asarray(jaxmodels.generate(model, params, PROMPTS, max_new_tokens=LENGTH))
    assert new.shape == (3, LENGTH)
    assert ((new >= 0) & (new < 50)).all()
    # Every greedy choice is the best of the full forward pass over the text so far, to rounding:
    # the state has not drifted.
    for prompt, row in zip(PROMPTS, new):
        text = np.concatenate([prompt, row])[None, :-1]
        logits = jax.jit(model.apply)(params, text)[0, len(prompt) - 1 :]
        chosen = jnp.take_along_axis(logits, row[:, None], -1)[:, 0]
        assert float(jnp.max(jnp.max(logits, -1) - chosen)) < 1e-3


@pytest.mark.parametrize("mixer", ["ttt_linear", "ttt_mlp_mamba"])
def test_memory_does_not_grow_with_the_text(mixer):
    model, params = tiny(mixer, num_layers=2)
    tokens, lengths = np.zeros((3, 15), np.int32), np.array([11, 2, 15], np.int32)

    def temporaries(new_tokens):
        key = jax.random.key(0)
        lowered = _generate.lower(
            model, new_tokens, 0.0, None, None, None, params, tokens, lengths, key
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # What grows is the answer itself, four bytes per token and row (and a copy of it).
    growth = temporaries(LENGTH) - temporaries(100)
    assert growth <= 3 * 4 * LENGTH * 3
