# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear: layers whose hidden state is a model trained at test time (see README.md in this
folder)."""

from jaxmodels.ttt.layer import TTTLinear, TTTLinearLayer, TTTLinearLayerState
from jaxmodels.ttt.official import from_official, to_official
from jaxmodels.ttt.presets import PRESETS, ttt_linear

__all__ = [
    "PRESETS",
    "TTTLinear",
    "TTTLinearLayer",
    "TTTLinearLayerState",
    "from_official",
    "to_official",
    "ttt_linear",
]
