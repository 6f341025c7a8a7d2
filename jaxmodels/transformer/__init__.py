# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The dense Transformer baseline, LLaMA-like (see README.md in this folder)."""

from jaxmodels.layers.attention import Attention, AttentionLayer, AttentionState
from jaxmodels.transformer.official import from_official, to_official
from jaxmodels.transformer.presets import PRESETS, transformer

__all__ = [
    "PRESETS",
    "Attention",
    "AttentionLayer",
    "AttentionState",
    "from_official",
    "to_official",
    "transformer",
]
