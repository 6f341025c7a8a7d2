# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Sizes of the dense baseline: the Transformers that the TTT paper compares with (appendix C)."""

from jaxmodels.decoder import DecoderConfig
from jaxmodels.layers.attention import Attention
from jaxmodels.layers.channel import SwiGLU
from jaxmodels.layers.embeddings import TokenInputs


def transformer(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    vocab_size: int = 32000,
    num_kv_heads: int | None = None,
    **options,
) -> DecoderConfig:
    """A LLaMA-like language model; further fields of `DecoderConfig` as keywords."""
    return DecoderConfig(
        d_model=d_model,
        num_layers=num_layers,
        inputs=TokenInputs(vocab_size=vocab_size),
        mixer=Attention(num_heads=num_heads, num_kv_heads=num_kv_heads),
        channel=SwiGLU(d_ff=d_ff),
        **options,
    )


PRESETS = {
    "transformer-125m": transformer(d_model=768, num_layers=12, num_heads=12, d_ff=2048),
    "transformer-350m": transformer(d_model=1024, num_layers=24, num_heads=16, d_ff=2736),
    "transformer-760m": transformer(d_model=1536, num_layers=24, num_heads=16, d_ff=4096),
    "transformer-1.3b": transformer(d_model=2048, num_layers=24, num_heads=32, d_ff=5504),
}
