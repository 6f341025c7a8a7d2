# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Generation: read the prompts (any lengths, one batch), then one compiled step per new token."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmodels.model import Model, Params


def sample(
    logits: jax.Array,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """One token id per row.

    Args:
      logits: (B, V).
      key: a jax.random key; not read when greedy.
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens. Ties at the k-th are all kept.
      top_p: keep the smallest set of most likely tokens whose probability (at this temperature,
        after top_k) reaches top_p.

    Returns:
      (B,) int32.
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits.astype(jnp.float32)
    if temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, -1, descending=True)
        probability = jax.nn.softmax(ordered, -1)
        before = jnp.cumsum(probability, -1) - probability  # mass of strictly more likely tokens
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError for settings that mean nothing."""
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1; None turns it off")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must lie in (0, 1]; None turns it off")


def pad_prompts(prompts: Sequence[Sequence[int]] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of any lengths -> tokens (B, P) int32 padded on the right, lengths (B,) int32."""
    rows = [np.asarray(row, np.int32) for row in prompts]
    if not rows or any(row.ndim != 1 or row.size == 0 for row in rows):
        raise ValueError(
            "generation needs at least one prompt, and every prompt at least one token"
        )
    lengths = np.array([row.size for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(row.size for row in rows)), np.int32)
    for tokens_row, row in zip(tokens, rows):
        tokens_row[: row.size] = row
    return tokens, lengths


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    eos_token: int | None = None,
) -> jax.Array:
    """Continues every prompt by `max_new_tokens` tokens.

    Args:
      model, params: from `jaxmodels.build` and `model.init`.
      prompts: token ids, one sequence per row, lengths may differ.
      max_new_tokens: how many tokens to add to each.
      temperature, top_k, top_p: see `sample`; the default is greedy.
      key: needed unless greedy.
      eos_token: a row that has produced it goes on with it; None never stops early.

    Returns:
      (B, max_new_tokens) int32, without the prompts.

    Raises:
      ValueError: for an empty prompt, ids outside the vocabulary, or settings that mean nothing.
    """
    check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature > 0 and key is None:
        raise ValueError("sampling with temperature > 0 needs key=jax.random.key(...)")
    tokens, lengths = pad_prompts(prompts)
    vocab = model.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(
            f"prompt has token ids outside 0..{vocab - 1}: is this the right tokenizer?"
        )
    key = jax.random.key(0) if key is None else key
    return _generate(
        model, max_new_tokens, temperature, top_k, top_p, eos_token, params, tokens, lengths, key
    )


def prefill(
    model: Model, params: Params, tokens: jax.Array, lengths: jax.Array, max_length: int
) -> tuple[jax.Array, object]:
    """Reads right-padded prompts. tokens (B, P), lengths (B,) -> logits (B, V) after each row's
    last token, state."""
    state = model.init_state(params, tokens.shape[0], max_length)
    valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
    hidden, state = model.apply(params, tokens, state=state, valid=valid, output="hidden")
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return model.logits(params, last)[:, 0], state


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _generate(
    model, max_new_tokens, temperature, top_k, top_p, eos_token, params, tokens, lengths, key
):
    logits, state = prefill(model, params, tokens, lengths, tokens.shape[1] + max_new_tokens)
    layers, state = model.apart(params), model.apart(state)
    done = jnp.zeros(tokens.shape[:1], bool)

    def choose(logits, key, done):
        token = sample(logits, key, temperature=temperature, top_k=top_k, top_p=top_p)
        if eos_token is not None:
            token = jnp.where(done, eos_token, token)
            done = done | (token == eos_token)
        return token, done

    first, done = choose(logits, jax.random.fold_in(key, 0), done)

    def step(carry, index):
        token, done, state = carry
        logits, state = model.apply(params, token[:, None], state=state, layers=layers)
        token, done = choose(logits[:, 0], jax.random.fold_in(key, index), done)
        return (token, done, state), token

    _, rest = jax.lax.scan(step, (first, done, state), jnp.arange(1, max_new_tokens))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
