# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The training loop. At every step, in this order: evaluate, save, next batch, step, log.

Step k uses batch k, which is a pure function of (seed, k). "At step k" means: after k updates. A
checkpoint of step k therefore continues with batch k, and nothing else of the past matters.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import jaxmodels
from train.checkpoint import (
    FOLDER,
    Checkpoints,
    check_resumable,
    check_same_data,
    make_meta,
)
from train.data import ngram, open_train, open_validation
from train.errors import UserError
from train.evaluate import EvaluationStopped, evaluate
from train.experiment import Experiment
from train.mesh import describe, local_rows, make_mesh, to_global
from train.metrics import (
    LOG_FILE,
    Deferred,
    RunLog,
    bytes_per_device,
    human,
    human_bytes,
    read_log,
    table,
    trim_log,
)
from train.plot import plot_curves
from train.serialize import to_json
from train.step import Trainer, check_packing, make_eval_step, make_trainer
from train.stop import StopRequest

SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.json"
CURVES_FILE = "loss.png"
MAX_SKIPS_IN_A_ROW = 25
SYNC_EVERY = 10  # steps between agreements of several processes on stopping and on saves by time


@dataclasses.dataclass(frozen=True)
class Result:
    """How a call of `train` ended."""

    step: int
    """Updates done so far."""
    finished: bool
    """False if a signal stopped it; calling `train` again goes on."""
    directory: Path
    """The run's folder."""
    summary: dict[str, Any] | None
    """What the end of training found; None before."""


class _NonFinite(Exception):
    """The loss or gradient of a step was not finite."""

    def __init__(self, step: int, values: dict[str, float], skips: int):
        self.step, self.values, self.skips = step, values, skips


def train(experiment: Experiment, *, devices=None) -> Result:
    """Trains an experiment from its latest checkpoint, or from the start, to its last step.

    SIGTERM and Ctrl-C save a checkpoint and return. `devices` default to all.

    Raises:
      UserError: for a config that does not fit the devices or the data, for a checkpoint that is
      damaged or of another
        run, and for a loss that is not finite. Nothing existing is changed by the first three.
    """
    with StopRequest() as stop, _compilation_cache(experiment.compilation_cache):
        return _train(experiment, devices, stop)


def _train(experiment: Experiment, devices, stop: StopRequest) -> Result:
    directory = Path(experiment.run_directory).absolute()
    say = print if jax.process_index() == 0 else (lambda *_, **__: None)
    model = build_model(experiment)
    check_packing(experiment)
    mesh = make_mesh(experiment.mesh, devices)
    trainer = make_trainer(experiment, model, mesh)
    eval_rows = experiment.evaluation.batch_size or experiment.batch_size
    eval_step, eval_sharding = make_eval_step(
        model, experiment.loss, mesh, eval_rows, experiment.sequence_length
    )
    if (done := _already_finished(experiment, directory, say)) is not None:
        return done

    batch_shape = dict(batch_size=experiment.batch_size, sequence_length=experiment.sequence_length)
    data = open_train(experiment.data, **batch_shape, seed=experiment.seed)
    check_vocabulary(model, data.tokenizer)
    validation = open_validation(experiment.data, **(batch_shape | {"batch_size": eval_rows}))
    if stop and jax.process_count() == 1:
        say(f"Stopped by {stop.name} before training began. Run the same command again.")
        return Result(0, False, directory, None)

    checkpoints = Checkpoints(directory, experiment.checkpoint)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(checkpoints.close)
        start = _start(experiment, trainer, checkpoints, data.fingerprint, say)
        first, state, evaluated = start
        if jax.process_index() == 0:
            trim_log(directory / LOG_FILE, first, evaluated is not None)
            (directory / CONFIG_FILE).write_text(json.dumps(to_json(experiment), indent=2) + "\n")
        flops_per_token = 3 * model.flops_per_token(experiment.sequence_length)
        say(_start_table(experiment, trainer, model, data.fingerprint, flops_per_token, first))
        log = RunLog(
            directory,
            experiment.log,
            first_step=first,
            steps=experiment.steps,
            flops_per_token=flops_per_token,
            unit="bytes" if experiment.data.tokenizer == "bytes" else "tokens",
        )
        cleanup.callback(log.close)

        rows = local_rows(
            trainer.batch_sharding, (experiment.batch_size, experiment.sequence_length)
        )
        skips = 0

        def finish_step(step: int, values: dict[str, float]) -> None:
            nonlocal skips
            skips = skips + 1 if values["non_finite"] else 0
            log.step_done(step, values)
            if skips and (experiment.non_finite == "stop" or skips >= MAX_SKIPS_IN_A_ROW):
                raise _NonFinite(step, values, skips)
            if skips:
                log.message(f"step {step}: loss or gradient not finite, update skipped")

        deferred = Deferred(finish_step)
        eval_params = "params" if experiment.ema_decay is None else "ema"

        def run_evaluation(step: int, batches: int | None) -> dict[str, float] | None:
            with log.pause():
                try:
                    values = evaluate(
                        eval_step,
                        state[eval_params],
                        validation,
                        eval_sharding,
                        rows=eval_rows,
                        batches=batches,
                        # Several processes must all read the same number of batches.
                        should_stop=lambda: bool(stop) and jax.process_count() == 1,
                    )
                except EvaluationStopped:
                    return None
            log.validation(step, values)
            return values

        def save(step: int) -> None:
            meta = make_meta(experiment, step, data.fingerprint, evaluated)
            with log.pause():
                checkpoints.save(step, state, meta)

        best = checkpoints.best_loss
        profiler = _Profiler(experiment, directory)
        cleanup.callback(profiler.close)
        clock = _SaveClock(experiment.checkpoint.every_minutes)
        batches = data.iterate(first, *rows)
        if first < experiment.steps:
            log.message("Compiling the train step ...")
        cleanup.callback(batches.close)
        step = first
        try:
            while step < experiment.steps:
                # Evaluate.
                every = experiment.evaluation.every
                if step > first:
                    evaluated = None
                new_best = False
                if every and step and step % every == 0 and evaluated is None:
                    deferred.flush()
                    evaluated = run_evaluation(step, experiment.evaluation.batches)
                    if evaluated is not None and evaluated["loss"] < best:
                        best, new_best = evaluated["loss"], True

                # Save.
                stopping, time_to_save = _agree(step, first, bool(stop), clock.due())
                save_every = experiment.checkpoint.every_steps
                by_step = save_every is not None and step > first and step % save_every == 0
                keep_best = new_best and experiment.checkpoint.keep_best > 0
                if by_step or time_to_save or keep_best or stopping:
                    deferred.flush()
                    if step:
                        save(step)
                    clock.reset()
                if stopping:
                    break

                # Next batch.
                batch = to_global(
                    next(batches), trainer.batch_sharding, experiment.batch_size, rows[0]
                )

                # Step.
                profiler.before(step)
                state, metrics = trainer.step(state, batch)
                profiler.after(step, metrics)
                step += 1

                # Log, one step late.
                deferred(step - 1, metrics)
            deferred.flush()
        except _NonFinite as bad:
            raise _non_finite_error(bad, experiment, directory, data, checkpoints) from None
        profiler.close()

        if step < experiment.steps:
            checkpoints.wait()
            log.close()
            say(_how_to_go_on(stop, step, directory))
            return Result(step, False, directory, None)

        if step > first or evaluated is None or evaluated["tokens"] < validation.num_tokens:
            evaluated = run_evaluation(step, None)
        save(step)
        checkpoints.wait()
        log.close()
        if evaluated is None:
            say(_how_to_go_on(stop, step, directory))
            return Result(step, False, directory, None)
        summary = {
            "step": step,
            "validation": evaluated,
            "checkpoint": str(directory / FOLDER / str(step)),
            "tensorboard": str(directory / "tensorboard"),
            "log": str(directory / LOG_FILE),
        }
        finished = _finish(
            experiment,
            model,
            state[eval_params],
            data,
            validation,
            directory,
            summary,
            stop,
        )
        if jax.process_index() == 0:  # the others have no whole summary
            print(summary_text(summary) if finished else _how_to_go_on(stop, step, directory))
        return Result(step, finished, directory, summary)


def build_model(experiment: Experiment) -> jaxmodels.Model:
    """The model of an experiment; a config that it refuses is a UserError."""
    try:
        return jaxmodels.build(experiment.model)
    except ValueError as error:
        raise UserError(
            f"The model of experiment {experiment.name!r} is not possible: {error}"
        ) from None


def check_vocabulary(model, tokenizer) -> None:
    """UserError if the tokenizer has ids that the model does not know."""
    known = model.config.inputs.vocab_size
    if tokenizer.vocab_size > known:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, the model knows {known}. "
            f"Use --model.inputs.vocab-size {tokenizer.vocab_size} or more."
        )


def _start(experiment, trainer: Trainer, checkpoints: Checkpoints, data_fingerprint: str, say):
    """(first step, state, the evaluation saved with it): from the latest checkpoint, or new."""
    steps = checkpoints.steps()
    if not steps:
        return 0, trainer.init(jax.random.key(experiment.seed)), None
    folder = checkpoints.directory / str(steps[-1])
    meta = checkpoints.meta(steps[-1])
    changed = check_resumable(meta, experiment, folder)
    check_same_data(meta, data_fingerprint, folder)
    state = checkpoints.restore(steps[-1], trainer.shapes)
    say(f"Going on from {folder}.")
    for name, (old, new) in changed.items():
        say(f"  {name} was {old!r}, now {new!r}")
    return meta["step"], state, meta["validation"]


def _already_finished(experiment: Experiment, directory: Path, say) -> Result | None:
    """The result of a run that has nothing left to do, without opening data or compiling."""
    summary_file = directory / SUMMARY_FILE
    if not (directory / FOLDER).is_dir() or not summary_file.exists():
        return None
    with contextlib.closing(Checkpoints(directory, experiment.checkpoint)) as checkpoints:
        steps = checkpoints.steps()
        if not steps or steps[-1] < experiment.steps:
            return None
        folder = checkpoints.directory / str(steps[-1])
        check_resumable(checkpoints.meta(steps[-1]), experiment, folder)
    try:
        summary = json.loads(summary_file.read_text())
        text = summary_text(summary)
    except (ValueError, KeyError, TypeError):
        return None
    if summary["step"] != steps[-1]:
        return None
    say(
        f"This run is finished: {directory} has {steps[-1]} of {experiment.steps} steps. "
        "Raise --steps to train on, or choose another --name for a new run."
    )
    say(text)
    return Result(steps[-1], True, directory, summary)


def _start_table(experiment, trainer, model, data_fingerprint, flops_per_token, first) -> str:
    devices = trainer.mesh.devices
    config = experiment.model
    micro = experiment.accumulation_steps
    return table(
        {
            "run": f"{experiment.run_directory} ({f'from step {first}' if first else 'new'})",
            "model": f"{config.num_layers} layers of {type(config.mixer).__name__} + "
            f"{type(config.channel).__name__}, width {config.d_model}, "
            f"{model.num_params:,} parameters",
            "memory": f"{human_bytes(bytes_per_device(trainer.shapes))} per device for parameters "
            "and optimizer state",
            "compute": f"{human(flops_per_token, 'FLOP')} per trained token",
            "mesh": f"{describe(trainer.mesh)}, on {devices.size} x {devices.flat[0].device_kind}"
            + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""),
            "batch": f"{experiment.batch_size} rows of {experiment.sequence_length} tokens"
            + (f" in {micro} micro-batches" if micro > 1 else ""),
            "data": f"{', '.join(experiment.data.train)} (fingerprint {data_fingerprint[:12]})",
            "steps": f"{experiment.steps:,}",
        }
    )


def _agree(step: int, first: int, stop: bool, time_to_save: bool) -> tuple[bool, bool]:
    """What all processes do now: a signal or a clock of one of them must not leave the others
    behind."""
    if jax.process_count() == 1:
        return stop, time_to_save
    if (step - first) % SYNC_EVERY:
        return False, False
    from jax.experimental import multihost_utils

    flags = multihost_utils.process_allgather(np.array([stop, time_to_save], np.int32))
    return bool(flags[:, 0].any()), bool(flags[0, 1])


class _SaveClock:
    """Says when `minutes` have passed since the last checkpoint."""

    def __init__(self, minutes: float | None):
        self._seconds = math.inf if minutes is None else 60.0 * minutes
        self.reset()

    def due(self) -> bool:
        return time.monotonic() - self._last >= self._seconds

    def reset(self) -> None:
        self._last = time.monotonic()


class _Profiler:
    """Records a window of steps with the JAX profiler."""

    def __init__(self, experiment: Experiment, directory: Path):
        self._start = experiment.profile.start
        self._end = (self._start or 0) + experiment.profile.steps
        self._folder, self._running = str(directory / "tensorboard"), False

    def before(self, step: int) -> None:
        if step == self._start:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, metrics: Any) -> None:
        if self._running and step + 1 >= self._end:
            # Steps run behind the program: let the last one end inside the window.
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


@contextlib.contextmanager
def _compilation_cache(folder: str | None) -> Iterator[None]:
    """Keeps compiled programs in a folder while active."""
    if folder is None:
        yield
        return
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).absolute()))
    # JAX decides once per process whether it has a cache; a compilation before this would be that
    # once.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def _how_to_go_on(stop: StopRequest, step: int, directory: Path) -> str:
    signal = stop.name or "another process"
    if not step:
        return f"Stopped by {signal} before the first step. Run the same command again."
    return (
        f"Stopped by {signal} after {step} steps; saved {directory / FOLDER / str(step)}. "
        "Run the same command again to go on from there."
    )


def _non_finite_error(bad: _NonFinite, experiment, directory: Path, data, checkpoints) -> UserError:
    """Saves the batch of a step whose loss was not finite, and the error that says so."""
    file = directory / f"non_finite_step_{bad.step}.npz"
    examples = data.describe(bad.step)
    if jax.process_index() == 0:
        batch = data.batch_at(bad.step)
        np.savez(file, step=bad.step, examples=np.array([str(e) for e in examples]), **batch)
    what = f"loss {bad.values['loss']}, gradient norm {bad.values['grad_norm']}"
    saved = checkpoints.steps()
    remedy = (
        "Lower --optimizer.learning-rate, set --optimizer.clip-norm, or go past it with "
        "--non-finite skip"
    )
    if bad.skips > 1:
        what += f"; {bad.skips} updates in a row were skipped"
        remedy = "Lower --optimizer.learning-rate or set --optimizer.clip-norm"
    shown = ", ".join(map(str, examples[:4])) + (", ..." if len(examples) > 4 else "")
    where = (
        f"the next start goes on from step {saved[-1]}" if saved else "there is no checkpoint yet"
    )
    return UserError(
        f"Step {bad.step} is not finite ({what}); its update was not applied. The batch is saved "
        "in "
        f"{file} (examples {shown}); {where}. {remedy}."
    )


def _finish(experiment, model, params, data, validation, directory: Path, summary, stop) -> bool:
    """Yardsticks, picture, continuation; fills `summary`. False if a signal cut it short."""
    byte_level = experiment.data.tokenizer == "bytes"
    sample = experiment.sample
    if sample.prompt and jax.process_count() == 1:
        tokens = jaxmodels.generate(
            model,
            params,
            [data.tokenizer.encode(sample.prompt)],
            max_new_tokens=sample.max_new_tokens,
            temperature=sample.temperature,
            top_k=sample.top_k,
            top_p=sample.top_p,
            key=jax.random.key(experiment.seed),
        )
        text = data.tokenizer.decode(np.asarray(tokens[0]).tolist())
        summary["sample"] = {"prompt": sample.prompt, "continuation": text}
    elif sample.prompt:
        summary["sample_note"] = (
            "A run of several processes does not generate; use `jaxmodels generate --checkpoint`."
        )
    if stop or jax.process_index() != 0:
        return not stop
    scores = yardsticks(data, validation) if experiment.baselines else {}
    summary["yardsticks"] = scores
    if stop:
        return False
    curves = directory / CURVES_FILE
    plot_curves(
        read_log(directory / LOG_FILE),
        curves,
        title=f"{experiment.name}: {model.num_params:,} parameters",
        bits_per_byte=byte_level,
        yardsticks=scores,
    )
    summary["curves"] = str(curves)
    partial = directory / (SUMMARY_FILE + ".tmp")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.replace(directory / SUMMARY_FILE)
    return True


def yardsticks(data, validation) -> dict[str, float]:
    """Bits per byte of a unigram and an order-3 n-gram model of the training bytes, on the
    validation bytes."""
    model = ngram.fit([rows.file.tokens for rows in data.rows], 3)
    text = validation.targets_bytes()
    return {
        "unigram": ngram.prefix(model, 1).bits_per_byte(text),
        "order-3 n-gram": model.bits_per_byte(text),
    }


def summary_text(summary: dict[str, Any]) -> str:
    """The summary for people."""
    validation = summary["validation"]
    rows = {
        "validation": f"{validation['bits_per_byte']:.4f} bits per byte "
        f"(loss {validation['loss']:.4f}, perplexity {validation['perplexity']:.3f}, "
        f"{int(validation['tokens']):,} tokens)"
    }
    for name, value in summary.get("yardsticks", {}).items():
        rows[name] = f"{value:.4f} bits per byte on the same text"
    rows |= {
        "checkpoint": summary["checkpoint"],
        "TensorBoard": f"tensorboard --logdir {summary['tensorboard']}",
        "log": summary["log"],
        "curves": summary["curves"],
    }
    text = f"Finished {summary['step']:,} steps.\n{table(rows)}"
    if "sample" in summary:
        sample = summary["sample"]
        text += (
            f"\nContinuation of {sample['prompt']!r}:\n{sample['prompt']}{sample['continuation']}"
        )
    if "sample_note" in summary:
        text += f"\n{summary['sample_note']}"
    return text
