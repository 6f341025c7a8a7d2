# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Recent sequence-model research in JAX: exact, fast, and made to compose.

Functional door:  model = build(config); params = model.init(key); out = model.apply(params, tokens)
Module door:      module = Decoder(config, rngs=nnx.Rngs(0)); out = module(tokens)
"""

from jaxmodels import checkpoints, losses, sharding, transformer, ttt
from jaxmodels.decoder import Decoder, DecoderConfig, Residual
from jaxmodels.generate import generate, sample
from jaxmodels.layers.attention import Attention
from jaxmodels.layers.channel import GeluMLP, SwiGLU
from jaxmodels.layers.convolution import CausalConv
from jaxmodels.layers.embeddings import LMHead, TokenInputs
from jaxmodels.layers.norms import LayerNorm, RMSNorm
from jaxmodels.model import Model, build
from jaxmodels.ttt import TTTMLP, TTTLinear

PRESETS = transformer.PRESETS | ttt.PRESETS
"""Published sizes by name."""

__all__ = [
    "PRESETS",
    "TTTMLP",
    "Attention",
    "CausalConv",
    "Decoder",
    "DecoderConfig",
    "GeluMLP",
    "LMHead",
    "LayerNorm",
    "Model",
    "RMSNorm",
    "Residual",
    "SwiGLU",
    "TTTLinear",
    "TokenInputs",
    "build",
    "checkpoints",
    "generate",
    "losses",
    "sample",
    "sharding",
    "transformer",
    "ttt",
]
