# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""An experiment as frozen dataclasses: the single source of every default.

A config file is Python with a function `experiment()` that returns an `Experiment`; the command
line overrides any field by its dotted name. Each field's docstring is its help text.
"""

import dataclasses
from typing import Literal

from jaxmodels.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig:
    """Where text comes from, how it becomes tokens, and how tokens become rows."""

    train: tuple[str, ...] = ("stdlib",)
    """Training sources: token files made by `jaxmodels data tokens`, `stdlib` (the running Python's
    own sources and documentation), or `hf:DATASET:SPLIT:COLUMN` (a Hugging Face data set, extra
    `hf`)."""
    train_weights: tuple[float, ...] | None = None
    """Share of rows from each training source; None means in proportion to their size."""
    validation: tuple[str, ...] = ("stdlib",)
    """Validation sources, read once from start to end."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizers` JSON file. Must be the one that made the token
    files."""
    packing: Literal["windows", "documents"] = "windows"
    """`windows`: rows cut from the concatenated documents. `documents`: whole documents packed into
    rows, with segment ids, so that attention does not cross them and positions restart."""
    cache_directory: str = "runs/data"
    """Where token files built on demand (`stdlib`, `hf:`) are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, its learning-rate schedule and gradient clipping."""

    name: Literal["adamw", "muon", "lion", "adafactor", "sgd"] = "adamw"
    """The optax optimizer. `muon` uses Adam for the embedding, the output matrix and whatever is
    not a matrix; `adafactor` does not scale its updates by the parameters."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after warm-up; `wsd` is warm-up, stable, decay."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0 (the first update uses rate 0). Counted inside the total."""
    final_learning_rate: float = 0.0
    """Learning rate at the last step (cosine, linear, wsd)."""
    wsd_decay_fraction: float = 0.2
    """Share of all steps spent in the final linear decay of `wsd`."""
    b1: float = 0.9
    """First-moment decay (momentum for `sgd` and `muon`)."""
    b2: float = 0.95
    """Second-moment decay."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_mask: Literal["matrices", "all"] = "matrices"
    """What decays: `matrices` (no norms, biases, position factors; the embedding decays), or `all`
    parameters, as the official TTT recipe does."""
    clip_norm: float | None = 1.0
    """Clip the global gradient norm to this; None turns it off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross-entropy of the language model."""

    reduction: Literal["tokens", "rows"] = "tokens"
    """What is averaged: all weighted `tokens` of the global batch, or first the tokens of each row
    and then the `rows` that have any (the official TTT recipe). Evaluation averages tokens."""
    ignore_token: int | None = None
    """Targets of this id do not count (the official TTT recipe leaves out the begin-of-text token,
    1)."""
    z_loss: float = 0.0
    """Weight of mean(log Z ** 2), which keeps logits from drifting."""
    chunk: int = 512
    """Positions whose logits exist at one time; the full (B, T, V) float32 array is never built."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerLRConfig:
    """Warm-up of the inner learning rates of TTT layers, besides that of the optimizer."""

    start: float = 1.0
    """Factor on the inner learning rates at the first step, from where it rises linearly to 1; it
    is rounded to bfloat16, as in the official recipe. Evaluation always uses 1."""
    warmup_steps: int = 0
    """Steps until the factor is 1; 0 turns the warm-up off."""

    @property
    def active(self) -> bool:
        """Whether the factor is ever other than 1."""
        return self.warmup_steps > 0 and self.start != 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; one may be -1 (what the others leave)."""

    data: int = -1
    """Pure data parallelism: parameters replicated."""
    fsdp: int = 1
    """Data parallelism with parameters and optimizer state sharded."""
    tensor: int = 1
    """Heads, MLP width and vocabulary split."""
    sequence: int = 1
    """Tokens of one sequence split."""
    expert: int = 1
    """Experts split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and on how much validation data to evaluate."""

    every: int = 250
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: int | None = None
    """Batches of validation data per evaluation during training, spread evenly over the data; None
    means all of it. The final evaluation always reads all of it."""
    batch_size: int | None = None
    """Rows per evaluation batch; None means the training batch size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every_steps: int | None = 500
    """Steps between checkpoints; None turns saving by step off."""
    every_minutes: float | None = 10.0
    """Minutes between checkpoints; None turns saving by time off."""
    keep_last: int = 2
    """Most recent checkpoints to keep."""
    keep_best: int = 1
    """Checkpoints of lowest validation loss to keep besides. Unless 0, every evaluation better than
    all before it is saved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while training."""

    every: int = 10
    """Steps between lines of the log."""
    progress_bar: bool | None = None
    """None: a bar on a terminal, a line per log step otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A window of steps recorded by the JAX profiler (view with TensorBoard or xprof)."""

    start: int | None = None
    """First profiled step; None turns profiling off."""
    steps: int = 3
    """How many steps to record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The continuation printed at the end of training."""

    prompt: str = ""
    """Text to continue; empty turns it off."""
    max_new_tokens: int = 300
    """Tokens to generate."""
    temperature: float = 0.7
    """0 is greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = 0.95
    """Sample from the smallest set of tokens with this total probability."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that determines a training run."""

    name: str
    """Names the run and its folder."""
    model: DecoderConfig
    """The decoder and the parts in its slots."""
    data: TextDataConfig = TextDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    inner_lr: InnerLRConfig = InnerLRConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()
    sample: SampleConfig = SampleConfig()

    steps: int = 1000
    """Optimizer steps in all."""
    batch_size: int = 8
    """Rows per step over all devices and micro-batches."""
    sequence_length: int = 512
    """Tokens per row."""
    accumulation_steps: int = 1
    """Micro-batches per step; gradients are summed and divided once by the total weight."""
    seed: int = 0
    """Seeds the parameters and the order of the data."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the parameters with this decay (less in the first
    steps, so that the random start is forgotten); evaluation and generation use it."""
    non_finite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: `stop` with the batch saved, or `skip` that update
    and go on, up to 24 times in a row."""
    directory: str | None = None
    """The run's folder; None means runs/NAME."""
    cpu_devices: int | None = None
    """Without an accelerator: how many devices to make of this machine's CPU. Two cores run a small
    model faster as two devices that share the rows than as one device with two threads. None leaves
    one. Without effect where there is an accelerator."""
    compilation_cache: str | None = None
    """Folder of the persistent compilation cache; None turns it off."""
    baselines: bool = False
    """Also score a unigram and an order-3 n-gram byte model, fitted to the training bytes, on the
    same validation bytes (byte-level tokenizer only)."""

    def __post_init__(self):
        for field in (
            "steps",
            "batch_size",
            "sequence_length",
            "accumulation_steps",
            "cpu_devices",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"accumulation_steps={self.accumulation_steps}"
            )
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ValueError(f"ema_decay={self.ema_decay} must lie between 0 and 1")
        if self.baselines and self.data.tokenizer != "bytes":
            raise ValueError("baselines=True compares bytes: it needs data.tokenizer='bytes'")

    @property
    def run_directory(self) -> str:
        """The folder of this run."""
        return self.directory or f"runs/{self.name}"
