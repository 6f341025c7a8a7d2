# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The inner loop of TTT-MLP."""

from pallas_kernels.ttt_mlp.state import TTTMLPState, init_state

__all__ = ["TTTMLPState", "init_state"]
