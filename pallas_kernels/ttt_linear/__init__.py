# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner loop of TTT-Linear (see README.md in this folder)."""

from pallas_kernels.ttt_linear.api import ttt_linear
from pallas_kernels.ttt_linear.losses import inner_losses
from pallas_kernels.ttt_linear.state import TTTLinearState, init_state

__all__ = ["TTTLinearState", "init_state", "inner_losses", "ttt_linear"]
