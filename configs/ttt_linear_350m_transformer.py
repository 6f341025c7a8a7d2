# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""TTT-Linear 350M with the Transformer backbone: 7B tokens of text, context 2048."""

from configs._ttt import recipe
from train.experiment import Experiment


def experiment() -> Experiment:
    return recipe("ttt-linear-350m-transformer")
