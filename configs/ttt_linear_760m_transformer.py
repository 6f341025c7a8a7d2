# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear 760M with the Transformer backbone: 15B tokens of text, context 2048."""

from configs._ttt import recipe
from train.experiment import Experiment


def experiment() -> Experiment:
    return recipe("ttt-linear-760m-transformer")
