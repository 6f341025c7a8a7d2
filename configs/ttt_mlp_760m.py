# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-MLP 760M with the Mamba backbone: 15B tokens of text, context 2048."""

from configs._ttt import recipe
from train.experiment import Experiment


def experiment() -> Experiment:
    return recipe("ttt-mlp-760m")
