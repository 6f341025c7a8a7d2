# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""A byte-level TTT-Linear language model on Python's own sources: five minutes on two CPU cores."""

import dataclasses

from jaxmodels.ttt import ttt_linear
from train.experiment import (
    CheckpointConfig,
    EvaluationConfig,
    Experiment,
    OptimizerConfig,
    SampleConfig,
    TextDataConfig,
)


def experiment() -> Experiment:
    model = ttt_linear(
        d_model=256, num_layers=3, num_heads=4, d_ff=704, vocab_size=256, dtype="float32"
    )
    return Experiment(
        name="ttt_linear_bytes",
        model=dataclasses.replace(model, scan_layers=False),
        data=TextDataConfig(train=("stdlib",), validation=("stdlib",), tokenizer="bytes"),
        optimizer=OptimizerConfig(name="muon", learning_rate=4e-3, warmup_steps=50),
        evaluation=EvaluationConfig(every=100, batches=8),
        checkpoint=CheckpointConfig(every_steps=200, every_minutes=2.0),
        # At a lower temperature so small a model falls into endless indentation.
        sample=SampleConfig(
            prompt='def read_text(path, encoding="utf-8"):\n    ',
            temperature=0.9,
            max_new_tokens=300,
        ),
        steps=600,
        batch_size=4,
        sequence_length=512,
        cpu_devices=2,
        baselines=True,
    )
