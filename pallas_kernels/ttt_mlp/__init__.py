# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner loop of TTT-MLP (see README.md in this folder)."""

from pallas_kernels.ttt_mlp.api import ttt_mlp
from pallas_kernels.ttt_mlp.losses import inner_losses
from pallas_kernels.ttt_mlp.state import TTTMLPState, init_state

__all__ = ["TTTMLPState", "init_state", "inner_losses", "ttt_mlp"]
