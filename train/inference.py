# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The commands that use a trained model: `evaluate` and `generate`. Neither needs the mesh it was
trained on."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import jax
import numpy as np
import tyro

import jaxmodels
from train.checkpoint import find_checkpoint, load, read_meta
from train.data import load_tokenizer, open_validation
from train.errors import UserError
from train.evaluate import evaluate
from train.experiment import MeshConfig
from train.mesh import batch_parts, make_mesh
from train.serialize import from_json
from train.step import make_eval_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Loss, perplexity and bits per byte of a checkpoint over validation data."""

    checkpoint: str
    """Folder of a run, or of one checkpoint."""
    step: str = "latest"
    """Which checkpoint of a run: `latest`, `best`, or a number."""
    validation: tuple[str, ...] | None = None
    """Validation sources; None means those of the run."""
    sequence_length: int | None = None
    """Tokens per row; None means that of the run."""
    batch_size: int | None = None
    """Rows per batch; None means that of the run, rounded up to fit the mesh. The result does not
    depend on it."""
    mesh: MeshConfig = MeshConfig()
    """Over which devices to spread; need not be the mesh of the run."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Continues prompts with a trained model."""

    checkpoint: str
    """Folder of a run, or of one checkpoint."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to continue; may be given several times, `-` reads standard input."""
    step: str = "latest"
    """Which checkpoint of a run: `latest`, `best`, or a number."""
    max_new_tokens: int = 300
    """Tokens to generate."""
    temperature: float = 0.7
    """0 is greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = 0.95
    """Sample from the smallest set of tokens with this total probability."""
    seed: int = 0
    """Of the sampling."""


def _step(text: str) -> int | str:
    if text in ("latest", "best"):
        return text
    if text.isdigit():
        return int(text)
    raise UserError(f"--step {text}: give latest, best, or a number.")


def run_evaluate(command: EvaluateCommand) -> str:
    """Evaluates a checkpoint; returns what to print."""
    mesh = make_mesh(command.mesh)
    loaded = load(command.checkpoint, step=_step(command.step), mesh=mesh)
    experiment = loaded.experiment
    data = experiment.data
    if command.validation is not None:
        data = dataclasses.replace(data, validation=command.validation)
    length = command.sequence_length or experiment.sequence_length
    rows = command.batch_size
    if rows is None:
        rows = experiment.evaluation.batch_size or experiment.batch_size
        rows = -(-rows // batch_parts(mesh)) * batch_parts(mesh)
    validation = open_validation(data, batch_size=rows, sequence_length=length)
    eval_step, sharding = make_eval_step(loaded.model, experiment.loss, mesh, rows, length)
    values = evaluate(eval_step, loaded.params, validation, sharding, rows=rows)
    if command.json:
        return json.dumps({"checkpoint": str(loaded.folder), "step": loaded.step} | values)
    return (
        f"{loaded.folder} (step {loaded.step}) on {', '.join(data.validation)}:\n"
        f"  bits per byte  {values['bits_per_byte']:.4f}\n"
        f"  loss           {values['loss']:.4f} nats per token\n"
        f"  perplexity     {values['perplexity']:.3f}\n"
        f"  tokens         {int(values['tokens']):,}"
    )


def run_generate(command: GenerateCommand) -> Iterator[str]:
    """Generates from a checkpoint; yields the text of each prompt with its continuation."""
    if not command.prompt:
        raise UserError("Give a text to continue: --prompt TEXT, or --prompt - for standard input.")
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in command.prompt]
    folder = find_checkpoint(command.checkpoint, _step(command.step))
    experiment = from_json(read_meta(folder)["experiment"], where=f"the config in {folder}")
    tokenizer = load_tokenizer(experiment.data.tokenizer)
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    if not all(tokens):
        raise UserError("A prompt is empty: give at least one character to continue.")
    loaded = load(folder)
    try:
        new = jaxmodels.generate(
            loaded.model,
            loaded.params,
            tokens,
            max_new_tokens=command.max_new_tokens,
            temperature=command.temperature,
            top_k=command.top_k,
            top_p=command.top_p,
            key=jax.random.key(command.seed),
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    for i, (prompt, row) in enumerate(zip(prompts, np.asarray(new))):
        text = prompt + tokenizer.decode(row.tolist())
        yield f"--- prompt {i + 1}\n{text}" if len(prompts) > 1 else text
