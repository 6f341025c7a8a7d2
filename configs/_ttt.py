# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The published training recipe of TTT (paper appendix C and the official scripts).

Half a million tokens per step, AdamW with decay on every parameter, warm-up and cosine to 1e-5; for
TTT-MLP the inner learning rates warm up together with that of the optimizer, from a tenth. At
another context keep the tokens per step: `--sequence-length 8192 --batch-size 64`.

The published runs read the Pile (contexts of 2k and 8k) or Books3 (1k to 32k) in Llama-2 tokens,
each document begun by the token 1, whose prediction does not count. Name your own token files:
`--data.train FILE --data.validation FILE --data.tokenizer FILE`.
"""

import dataclasses

import jaxmodels
from jaxmodels import TTTMLP
from train.experiment import (
    EvaluationConfig,
    Experiment,
    InnerLRConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    TextDataConfig,
)

SCHEDULES = {
    "125m": (4_800, 3e-3),
    "350m": (13_500, 1.5e-3),
    "760m": (29_000, 1.25e-3),
    "1.3b": (50_000, 1e-3),
}
"""Steps and peak learning rate; the first tenth of the steps is warm-up."""


def recipe(preset: str) -> Experiment:
    """The experiment of a preset of `jaxmodels.ttt`."""
    steps, peak = SCHEDULES[preset.split("-")[2]]
    warmup = steps // 10
    model = dataclasses.replace(jaxmodels.PRESETS[preset], dtype="bfloat16", remat="full")
    is_mlp = isinstance(model.mixer, TTTMLP)
    return Experiment(
        name=preset.replace("-", "_").replace(".", "_"),
        model=model,
        data=TextDataConfig(
            train=("data/train.tokens",),
            validation=("data/validation.tokens",),
            tokenizer="data/tokenizer.json",
        ),
        optimizer=OptimizerConfig(
            learning_rate=peak,
            warmup_steps=warmup,
            final_learning_rate=1e-5,
            weight_decay=0.1,
            decay_mask="all",
        ),
        loss=LossConfig(reduction="rows", ignore_token=1),
        inner_lr=InnerLRConfig(start=0.1, warmup_steps=warmup) if is_mlp else InnerLRConfig(),
        mesh=MeshConfig(data=1, fsdp=-1),
        evaluation=EvaluationConfig(every=1000, batches=16),
        steps=steps,
        batch_size=256,
        sequence_length=2048,
    )
