# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear and TTT-MLP: layers whose hidden state is a model trained at test time (see README.md
in this folder)."""

from jaxmodels.ttt import stream
from jaxmodels.ttt.config import TTT, TTTMLP, TTTLinear
from jaxmodels.ttt.layer import STATISTICS, VIEWS, TTTLayer, TTTLayerState
from jaxmodels.ttt.official import (
    config_from_official,
    config_to_official,
    from_official,
    to_official,
)
from jaxmodels.ttt.presets import PRESETS, ttt_linear, ttt_mlp

__all__ = [
    "PRESETS",
    "STATISTICS",
    "TTT",
    "TTTMLP",
    "VIEWS",
    "TTTLayer",
    "TTTLayerState",
    "TTTLinear",
    "config_from_official",
    "config_to_official",
    "from_official",
    "stream",
    "to_official",
    "ttt_linear",
    "ttt_mlp",
]
