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
from jaxmodels.generate import check_sampling
from jaxmodels.ttt import TTT
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
from train.step import Trainer, check_traceable, make_eval_step, make_trainer
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
        damaged or of another run (all these before any file is changed), and for a loss that is
        not finite.
    """
    _set_cpu_devices(experiment.cpu_devices)
    with StopRequest() as stop, _compilation_cache(experiment.compilation_cache):
        return _train(experiment, devices, stop)


def _train(experiment: Experiment, devices, stop: StopRequest) -> Result:
    directory = Path(experiment.run_directory).absolute()
    primary = jax.process_index() == 0
    say = print if primary else (lambda *_, **__: None)

    # Whatever does not fit raises here, before any file is touched.
    model = build_model(experiment)
    check_settings(experiment)
    mesh = make_mesh(experiment.mesh, devices)
    trainer = make_trainer(experiment, model, mesh)
    evaluator = _Evaluator(experiment, model, mesh, stop)
    if (done := _already_finished(experiment, directory, say)) is not None:
        return done
    check_traceable(experiment, model, mesh)
    data = open_train(
        experiment.data,
        batch_size=experiment.batch_size,
        sequence_length=experiment.sequence_length,
        seed=experiment.seed,
    )
    check_vocabulary(model, data.tokenizer)
    check_documents(experiment, data)
    evaluator.open(experiment)
    if stop and jax.process_count() == 1:
        say(f"Stopped by {stop.name} before training began. Run the same command again.")
        return Result(0, False, directory, None)

    with contextlib.ExitStack() as cleanup:
        checkpoints = Checkpoints(directory, experiment.checkpoint)
        cleanup.callback(checkpoints.close)
        first, state, evaluated = _start(experiment, trainer, checkpoints, data.fingerprint, say)
        if primary:
            checkpoints.remove_partial()
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
        deferred = Deferred(_StepEnd(experiment, log))
        profiler = _Profiler(experiment, directory)
        cleanup.callback(profiler.close)
        clock = _SaveClock(experiment.checkpoint.every_minutes)
        best = checkpoints.best_loss
        rows = local_rows(
            trainer.batch_sharding, (experiment.batch_size, experiment.sequence_length)
        )
        batches = data.iterate(first, *rows)
        cleanup.callback(batches.close)

        def save(step: int) -> None:
            with log.pause():
                meta = make_meta(experiment, step, data.fingerprint, evaluated)
                checkpoints.save(step, state, meta)

        step = first
        if step < experiment.steps:
            log.message("Compiling the train step ...")
        try:
            while step < experiment.steps:
                # Evaluate. The first step may find its evaluation in the checkpoint.
                evaluated = evaluated if step == first else None
                is_best = False
                if _is_due(experiment.evaluation.every, step) and evaluated is None:
                    deferred.flush()
                    evaluated = evaluator(state, step, log, experiment.evaluation.batches)
                    if evaluated is not None and evaluated["loss"] < best:
                        best, is_best = evaluated["loss"], True

                # Save.
                stopping, time_to_save = _agree(step, first, bool(stop), clock.due())
                by_step = step > first and _is_due(experiment.checkpoint.every_steps, step)
                keep_best = is_best and experiment.checkpoint.keep_best > 0
                if by_step or time_to_save or keep_best or stopping:
                    deferred.flush()
                    if step:
                        save(step)
                    clock.reset()
                if stopping:
                    break

                # Next batch.
                local = next(batches)
                batch = to_global(local, trainer.batch_sharding, experiment.batch_size, rows[0])

                # Step.
                profiler.before(step)
                state, metrics = trainer.step(state, batch)
                profiler.after(step, metrics)

                # Log, one step late.
                deferred(step, metrics)
                step += 1
            deferred.flush()
        except _NonFinite as bad:
            raise _non_finite_error(bad, directory, data, checkpoints) from None
        profiler.close()

        if step == experiment.steps:
            # The last evaluation reads all of the validation data.
            if step > first or not evaluator.is_complete(evaluated):
                evaluated = evaluator(state, step, log, None)
            save(step)
        checkpoints.wait()
        log.close()
        summary = None
        if step == experiment.steps and evaluated is not None:
            params = evaluator.params(state)
            summary = _finish(
                experiment, model, params, data, evaluator.validation, evaluated, stop
            )
        if summary is None:
            say(_how_to_go_on(stop, step, directory))
        elif primary:  # only the first process has all of it
            print(summary_text(summary))
        return Result(step, summary is not None, directory, summary)


class _Evaluator:
    """Evaluates the parameters of a state, or their moving average where the run keeps one."""

    def __init__(self, experiment: Experiment, model, mesh, stop: StopRequest):
        self.rows = experiment.evaluation.batch_size or experiment.batch_size
        self._step, self._sharding = make_eval_step(
            model, experiment.loss, mesh, self.rows, experiment.sequence_length
        )
        self._item = "params" if experiment.ema_decay is None else "ema"
        self._stop = stop
        self.validation: Any = None

    def open(self, experiment: Experiment) -> None:
        self.validation = open_validation(
            experiment.data, batch_size=self.rows, sequence_length=experiment.sequence_length
        )
        check_documents(experiment, self.validation)

    def params(self, state) -> Any:
        return state[self._item]

    def is_complete(self, values: dict[str, float] | None) -> bool:
        return values is not None and values["tokens"] == self.validation.num_tokens

    def __call__(
        self, state, step: int, log: RunLog, batches: int | None
    ) -> dict[str, float] | None:
        """The logged result, or None if a signal cut it short."""
        with log.pause():
            try:
                values = evaluate(
                    self._step,
                    self.params(state),
                    self.validation,
                    self._sharding,
                    rows=self.rows,
                    batches=batches,
                    # Several processes must all read the same number of batches.
                    should_stop=lambda: bool(self._stop) and jax.process_count() == 1,
                )
            except EvaluationStopped:
                return None
        log.validation(step, values)
        return values


class _StepEnd:
    """Takes the metrics of a finished step: logs them, and raises when they are not finite."""

    def __init__(self, experiment: Experiment, log: RunLog):
        self._stops, self._log, self._skips = experiment.non_finite == "stop", log, 0

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self._skips = self._skips + 1 if values["non_finite"] else 0
        self._log.step_done(step, values)
        if self._skips and (self._stops or self._skips >= MAX_SKIPS_IN_A_ROW):
            raise _NonFinite(step, values, self._skips)
        if self._skips:
            self._log.message(f"step {step}: loss or gradient not finite, update skipped")


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and every > 0 and step > 0 and step % every == 0


def _set_cpu_devices(count: int | None) -> None:
    """Makes `count` devices of the CPU; JAX allows that only before its first use."""
    if count is None or jax.config.jax_num_cpu_devices == count:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.default_backend() != "cpu" or jax.local_device_count() == count:
            return
        raise UserError(
            f"cpu_devices={count} comes too late: JAX is already running in this process. Start "
            "a new process, or leave cpu_devices out."
        ) from None


def build_model(experiment: Experiment) -> jaxmodels.Model:
    """The model of an experiment; a config that it refuses is a UserError."""
    try:
        return jaxmodels.build(experiment.model)
    except ValueError as error:
        raise UserError(
            f"The model of experiment {experiment.name!r} is not possible: {error}"
        ) from None


def check_settings(experiment: Experiment) -> None:
    """UserError for settings that would only fail in the middle of a run."""
    smallest = {
        "log.every": (experiment.log.every, 1),
        "evaluation.every": (experiment.evaluation.every, 0),
        "evaluation.batches": (experiment.evaluation.batches, 1),
        "evaluation.batch_size": (experiment.evaluation.batch_size, 1),
        "checkpoint.every_steps": (experiment.checkpoint.every_steps, 1),
        "checkpoint.keep_last": (experiment.checkpoint.keep_last, 1),
        "checkpoint.keep_best": (experiment.checkpoint.keep_best, 0),
        "profile.start": (experiment.profile.start, 0),
        "profile.steps": (experiment.profile.steps, 1),
        "loss.chunk": (experiment.loss.chunk, 1),
        "sample.max_new_tokens": (experiment.sample.max_new_tokens, 1),
    }
    for name, (value, least) in smallest.items():
        if value is not None and value < least:
            raise UserError(f"{name}={value} must be at least {least}.")
    sample = experiment.sample
    try:
        check_sampling(sample.temperature, sample.top_k, sample.top_p)
    except ValueError as error:
        raise UserError(f"sample.{error}.") from None
    if experiment.loss.reduction not in ("tokens", "rows"):
        raise UserError(f"loss.reduction={experiment.loss.reduction!r}: one of tokens, rows.")
    mixer, warm = experiment.model.mixer, experiment.inner_lr
    if warm.active and not mixer.takes_inner_lr:
        raise UserError(
            f"inner_lr warms up inner learning rates, which {type(mixer).__name__} does not have."
        )
    if warm.start < 0 or warm.warmup_steps < 0:
        raise UserError(
            f"inner_lr.start={warm.start} and inner_lr.warmup_steps={warm.warmup_steps} must be at "
            "least 0."
        )
    if experiment.data.packing == "documents" and not mixer.takes_segments:
        how = "Set --model.mixer.max-documents" if isinstance(mixer, TTT) else "Use Attention"
        raise UserError(
            "data.packing=documents puts several documents into a row, which "
            f"{type(mixer).__name__} does not keep apart as it is. {how}, or use --data.packing "
            "windows."
        )


def check_documents(experiment: Experiment, data) -> None:
    """UserError if a row of the data holds more documents than the mixer has room for."""
    room = getattr(experiment.model.mixer, "max_documents", None)
    if experiment.data.packing != "documents" or room is None:
        return
    most = max(rows.most_documents for rows in data.rows)
    if most > room:
        raise UserError(
            f"A row holds up to {most} documents, the model has room for {room}. Use "
            f"--model.mixer.max-documents {most}."
        )


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
    if meta["step"] > experiment.steps:
        raise UserError(
            f"{folder} has {meta['step']} steps already, more than steps={experiment.steps}. "
            f"Use --steps {meta['step']} or more, or another --name for a new run."
        )
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
        f"This run is finished: {directory} has its {steps[-1]:,} steps. "
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


def _non_finite_error(bad: _NonFinite, directory: Path, data, checkpoints) -> UserError:
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
        f"in {file} (examples {shown}); {where}. {remedy}."
    )


def _finish(
    experiment: Experiment, model, params, data, validation, evaluated, stop: StopRequest
) -> dict[str, Any] | None:
    """Yardsticks, picture, continuation: the summary. None if a signal cut it short."""
    directory = Path(experiment.run_directory).absolute()
    summary: dict[str, Any] = {
        "step": experiment.steps,
        "validation": evaluated,
        "checkpoint": str(directory / FOLDER / str(experiment.steps)),
        "tensorboard": str(directory / "tensorboard"),
        "log": str(directory / LOG_FILE),
        "curves": str(directory / CURVES_FILE),
    }
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
    if jax.process_index() != 0:
        return summary
    if not stop:
        summary["yardsticks"] = ngram.yardsticks(data, validation) if experiment.baselines else {}
    if stop:
        return None
    plot_curves(
        read_log(directory / LOG_FILE),
        directory / CURVES_FILE,
        title=f"{experiment.name}: {model.num_params:,} parameters",
        bits_per_byte=experiment.data.tokenizer == "bytes",
        yardsticks=summary["yardsticks"],
    )
    partial = directory / (SUMMARY_FILE + ".tmp")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.replace(directory / SUMMARY_FILE)
    return summary


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
