# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Published sizes of TTT-Linear with the Transformer backbone (paper appendix C; Llama-2
vocabulary)."""

from jaxmodels.decoder import DecoderConfig
from jaxmodels.layers.channel import SwiGLU
from jaxmodels.layers.embeddings import TokenInputs
from jaxmodels.ttt.layer import TTTLinear


def ttt_linear(
    *, d_model: int, num_layers: int, num_heads: int, d_ff: int, vocab_size: int = 32000, **options
) -> DecoderConfig:
    """A TTT-Linear language model; further fields of `DecoderConfig` as keywords."""
    return DecoderConfig(
        d_model=d_model,
        num_layers=num_layers,
        inputs=TokenInputs(vocab_size=vocab_size),
        mixer=TTTLinear(num_heads=num_heads),
        channel=SwiGLU(d_ff=d_ff),
        **options,
    )


PRESETS = {
    "ttt-linear-125m": ttt_linear(d_model=768, num_layers=12, num_heads=12, d_ff=2048),
    "ttt-linear-350m": ttt_linear(d_model=1024, num_layers=24, num_heads=16, d_ff=2736),
    "ttt-linear-760m": ttt_linear(d_model=1536, num_layers=24, num_heads=16, d_ff=4096),
    "ttt-linear-1.3b": ttt_linear(d_model=2048, num_layers=24, num_heads=32, d_ff=5504),
}
