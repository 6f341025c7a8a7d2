# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Token embedding and language-model head, tied or not."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmodels.sharding import constrain
from jaxmodels.slots import HeadConfig, InputsConfig, weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenInputs(InputsConfig):
    """One row of a table per token id, no scaling."""

    vocab_size: int
    """Number of token ids."""

    def __post_init__(self):
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} must be at least 1")

    def build(self, d_model, *, dtype="float32", param_dtype="float32", rngs):
        return TokenEmbedding(self, d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMHead(HeadConfig):
    """Logits over the vocabulary of `TokenInputs`."""

    tied: bool = True
    """Use the token embedding as the output matrix."""

    def check(self, decoder):
        if not isinstance(decoder.inputs, TokenInputs):
            raise ValueError(
                f"head=LMHead() predicts tokens, so inputs must be TokenInputs, got "
                f"{type(decoder.inputs).__name__}"
            )

    def build(self, decoder, *, rngs):
        if self.tied:
            return None
        vocab_size, param_dtype = decoder.vocab_size, decoder.param_dtype
        return Unembedding(decoder.d_model, vocab_size, param_dtype=param_dtype, rngs=rngs)

    def flops_per_token(self, decoder):
        return 2 * decoder.d_model * decoder.vocab_size


class TokenEmbedding(nnx.Module):
    """tokens (B, T) int -> (B, T, D) in `dtype`. Ids outside the vocabulary give NaN, not a
    neighbour's row."""

    def __init__(self, config: TokenInputs, d_model, *, dtype, param_dtype, rngs):
        self.config, self.dtype = config, dtype
        self.embedding = weight(rngs, (config.vocab_size, d_model), ("vocab", "embed"), param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # Collect the width (split by fsdp) before the gather: else XLA replicates the activations
        # instead.
        table = constrain(self.embedding[...].astype(jnp.dtype(self.dtype)), "vocab", None)
        x = jnp.take(table, tokens, axis=0, mode="fill", fill_value=jnp.nan)
        return constrain(x, "batch", "sequence", None)


class Unembedding(nnx.Module):
    """An output matrix of its own, (D, V)."""

    def __init__(self, d_model: int, vocab_size: int, *, param_dtype: str, rngs: nnx.Rngs):
        self.w = weight(rngs, (d_model, vocab_size), ("embed", "vocab"), param_dtype)
