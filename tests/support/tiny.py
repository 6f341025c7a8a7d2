# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The tiny models, experiments and texts that the tests of `train` share."""

import dataclasses

import numpy as np

import jaxmodels
from train.experiment import (
    CheckpointConfig,
    EvaluationConfig,
    Experiment,
    LogConfig,
    OptimizerConfig,
    TextDataConfig,
)

ROWS, LENGTH = 8, 64


def tiny_model(mixer="attention", *, vocab_size=256, **changes):
    """A model of two layers and width 32; `mixer` "attention", "ttt" or a config."""
    mixers = {
        "attention": jaxmodels.Attention(num_heads=2),
        "ttt": jaxmodels.TTTLinear(num_heads=2),
    }
    config = dict(
        d_model=32,
        num_layers=2,
        inputs=jaxmodels.TokenInputs(vocab_size=vocab_size),
        mixer=mixers.get(mixer, mixer),
        channel=jaxmodels.SwiGLU(d_ff=64),
        dtype="float32",
    )
    return jaxmodels.build(jaxmodels.DecoderConfig(**(config | changes)))


def tiny_experiment(mixer="attention", **changes):
    """An experiment around `tiny_model`; `optimizer`, `evaluation`, ... may be dicts of changes."""
    experiment = Experiment(
        name="tiny",
        model=tiny_model(mixer).config,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=3),
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every_steps=None, every_minutes=None),
        log=LogConfig(every=1, progress_bar=False),
        steps=20,
        batch_size=ROWS,
        sequence_length=LENGTH,
    )
    for name, value in changes.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(experiment, name), **value)
        experiment = dataclasses.replace(experiment, **{name: value})
    return experiment


def random_batch(seed, rows=ROWS, length=LENGTH, *, ragged=False):
    """A batch of random tokens; `ragged` gives every row another number of weighted tokens."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 256, (rows, length + 1)).astype(np.int32)
    weights = np.ones((rows, length), np.float32)
    if ragged:
        weights[np.arange(length) >= random.integers(0, length, (rows, 1))] = 0
        weights *= random.uniform(0.5, 1.5, weights.shape).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def learnable_batch(seed, rows=ROWS, length=LENGTH):
    """Rows that repeat a short random word: a tiny model learns them in a few steps."""
    random = np.random.default_rng(seed)
    words = random.integers(97, 105, (rows, 4))
    tokens = np.tile(words, length // 4 + 1)[:, : length + 1].astype(np.int32)
    weights = np.ones((rows, length), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def write_text(folder):
    """Two small token files of text in a folder; returns the data config that reads them."""
    from train.data.token_file import write_documents
    from train.data.tokenizer import load_tokenizer

    random = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "def", "return", "import", "class", "self", "None"]
    tokenizer = load_tokenizer("bytes")
    for name, count in (("train", 40), ("validation", 6)):
        documents = [" ".join(random.choice(words, 80)) + "\n" for _ in range(count)]
        write_documents(documents, str(folder / f"{name}.tokens"), tokenizer=tokenizer)
    return TextDataConfig(
        train=(str(folder / "train.tokens"),),
        validation=(str(folder / "validation.tokens"),),
        cache_directory=str(folder / "cache"),
    )
