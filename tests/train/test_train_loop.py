# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The loop in this process: what it writes, how it stops, how it goes on."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from measure import max_rel
from tiny import tiny_experiment, write_text

import jaxmodels
import train.loop
from train.checkpoint import load
from train.data import open_train, open_validation
from train.errors import UserError
from train.metrics import peak_flops, read_log
from train.serialize import from_json
from train.stop import StopRequest

ONE = jax.devices()[:1]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """(data config, folder for the compilation cache) that the tests here share."""
    folder = tmp_path_factory.mktemp("loop")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield write_text(folder), folder / "compiled"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def experiment(workshop, directory, **changes):
    data, cache = workshop
    defaults = dict(
        data=data,
        compilation_cache=str(cache),
        directory=str(directory),
        # A constant rate does not know the number of steps, so all these runs share one program.
        optimizer=dict(schedule="constant"),
        evaluation=dict(every=6, batches=3),
        checkpoint=dict(every_steps=5),
        steps=12,
    )
    return tiny_experiment(**(defaults | changes))


def run(experiment, devices=ONE):
    return train.loop.train(experiment, devices=devices)


@pytest.fixture(scope="module")
def finished(workshop, tmp_path_factory):
    """(experiment, result) of a whole run; read only."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = experiment(
        workshop, folder, baselines=True, sample=dict(prompt="alpha", max_new_tokens=12)
    )
    return config, run(config)


def log_of(directory, kind="train"):
    records = read_log(Path(directory) / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if r["kind"] == kind}


def contents(folder):
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(Path(folder).rglob("*"))
        if f.is_file()
    }


def params_of(directory, step):
    loaded = load(directory, step=step)
    return jax.tree.map(np.asarray, loaded.params)


def same_params(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_writes_everything_it_promises(finished):
    config, result = finished
    folder = result.directory
    assert result.finished and result.step == 12
    assert list(log_of(folder)) == list(range(12))
    assert list(log_of(folder, "validation")) == [6, 12]
    assert (folder / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert from_json(json.loads((folder / "config.json").read_text())) == config
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == result.summary
    assert len(summary["sample"]["continuation"]) > 0
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [10, 12]
    assert len(list((folder / "tensorboard").glob("events*"))) == 1


def test_tensorboard_reads_what_the_run_wrote(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(finished[1].directory / "tensorboard")
    events = EventAccumulator(folder, size_guidance={"tensors": 0})  # 0: keep all
    events.Reload()
    losses = [
        (e.step, float(e.tensor_proto.float_val[0])) if e.tensor_proto.float_val
        else (e.step, float(np.frombuffer(e.tensor_proto.tensor_content, "<f4")[0]))
        for e in events.Tensors("train/loss")
    ]  # fmt: skip
    want = log_of(finished[1].directory)
    assert [step for step, _ in losses] == list(want)
    np.testing.assert_allclose([v for _, v in losses], list(want.values()), rtol=1e-6)


def test_the_final_evaluation_counts_every_byte_once(finished):
    config, result = finished
    loaded = load(result.directory)
    validation = open_validation(config.data, batch_size=3, sequence_length=config.sequence_length)
    nll = weight = 0.0
    for batch in validation:
        logits = loaded.model.apply(loaded.params, batch["tokens"])
        value, _ = jaxmodels.losses.cross_entropy(logits, batch["targets"])
        nll += float(np.sum(np.asarray(value, np.float64) * batch["weights"]))
        weight += float(batch["weights"].sum())
    got = result.summary["validation"]
    assert weight == got["tokens"] == validation.num_tokens
    np.testing.assert_allclose(got["loss"], nll / weight, rtol=1e-5)
    np.testing.assert_allclose(got["perplexity"], math.exp(nll / weight), rtol=1e-5)
    np.testing.assert_allclose(got["bits_per_byte"], nll / math.log(2) / weight, rtol=1e-5)


def test_the_yardsticks_are_scored_on_the_same_bytes(finished):
    config, result = finished
    shape = dict(batch_size=8, sequence_length=64)
    counts = np.zeros(256)
    for rows in open_train(config.data, **shape, seed=0).rows:
        counts += np.bincount(rows.file.tokens, minlength=256)
    # Witten-Bell: with n bytes of t kinds, P(c) = (n(c) + t / 256) / (n + t).
    kinds = (counts > 0).sum()
    p = (counts + kinds / 256) / (counts.sum() + kinds)
    text = open_validation(config.data, **shape).targets_bytes()
    scores = result.summary["yardsticks"]
    np.testing.assert_allclose(scores["unigram"], -np.log2(p[text]).mean(), rtol=1e-9)
    assert 0 < scores["order-3 n-gram"] < scores["unigram"] < 8


def test_a_finished_run_says_so_and_touches_nothing(finished, capsys):
    config, result = finished
    before = contents(result.directory)
    again = run(config)
    out = capsys.readouterr().out
    assert again.finished and again.summary == result.summary
    assert "This run is finished" in out and "--steps" in out
    assert f"{result.summary['validation']['bits_per_byte']:.4f} bits per byte" in out
    assert contents(result.directory) == before


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run that a test may continue."""
    config, result = finished
    shutil.copytree(result.directory, tmp_path / "run")
    return dataclasses.replace(config, directory=str(tmp_path / "run"))


def test_more_steps_go_on_and_equal_a_run_that_had_them_from_the_start(
    workshop, finished, copied, tmp_path, capsys
):
    longer = dataclasses.replace(copied, steps=18)
    result = run(longer)
    assert "steps was 12, now 18" in capsys.readouterr().out
    straight = run(dataclasses.replace(longer, directory=str(tmp_path / "straight")))
    assert log_of(result.directory) == log_of(straight.directory)
    assert log_of(result.directory, "validation").keys() == {6, 12, 18}
    same_params(params_of(result.directory, 18), params_of(straight.directory, 18))
    assert result.summary["step"] == 18


def test_another_mesh_goes_on_within_rounding(copied, tmp_path):
    longer = dataclasses.replace(copied, steps=18, evaluation=dataclasses.replace(
        copied.evaluation, every=0))  # fmt: skip
    cube = dataclasses.replace(
        longer,
        mesh=dataclasses.replace(longer.mesh, data=2, fsdp=2, tensor=2),
        directory=str(tmp_path / "cube"),
    )
    shutil.copytree(copied.directory, cube.directory)
    run(longer)
    run(cube, devices=None)
    one, eight = log_of(longer.directory), log_of(cube.directory)
    assert one.keys() == eight.keys() == set(range(18))
    assert max_rel(list(eight.values()), list(one.values())) < 1e-5
    jax.tree.map(
        lambda a, b: max_rel(a, b) < 1e-4 or pytest.fail("parameters differ"),
        params_of(cube.directory, 18),
        params_of(longer.directory, 18),
    )


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(model={"num_layers": 3}), "another model"),
        (dict(seed=5), "seed was 0, now 5"),
        (dict(data={"packing": "documents"}), "trained on other data"),
        (dict(mesh={"data": 3}), "needs 3 devices"),
        (dict(model={"d_model": 36}), "another model"),
        (dict(data={"train": ("nowhere.tokens",)}), "nowhere.tokens"),
        (dict(optimizer={"warmup_steps": 99}), "warmup_steps=99"),
        (dict(evaluation={"batch_size": 3}, mesh={"fsdp": 2}), "devices"),
        (dict(log={"every": 0}), "log.every=0"),
    ],
)
def test_a_run_that_does_not_fit_changes_nothing(copied, changes, named):
    config = dataclasses.replace(copied, steps=24)
    for name, value in changes.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(config, name), **value)
        config = dataclasses.replace(config, **{name: value})
    before = contents(copied.directory)
    with pytest.raises(UserError, match=named):
        run(config)
    assert contents(copied.directory) == before


def test_fewer_steps_than_there_are(copied):
    os.remove(Path(copied.directory) / "summary.json")  # as if it had not got to its end
    before = contents(copied.directory)
    with pytest.raises(UserError, match="has 12 steps already, more than steps=11"):
        run(dataclasses.replace(copied, steps=11))
    assert contents(copied.directory) == before


def test_a_truncated_checkpoint_is_one_error_and_changes_nothing(copied):
    newest = Path(copied.directory) / "checkpoints" / "12" / "training"
    file = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:100])
    before = contents(copied.directory)
    with pytest.raises(UserError, match=r"12 is truncated or damaged.*go on from step 10"):
        run(dataclasses.replace(copied, steps=24))
    assert contents(copied.directory) == before


class Wrapped:
    """Data of which some parts are replaced."""

    def __init__(self, data, **parts):
        self._data, self._parts = data, parts

    def __getattr__(self, name):
        return self._parts.get(name) or getattr(self._data, name)

    def __len__(self):
        return len(self._data)


@pytest.fixture
def bad_batch(monkeypatch):
    """bad_batch(steps): the batches of these steps get a weight that makes the loss NaN."""

    def install(steps):
        def opened(*args, **kwargs):
            data = open_train(*args, **kwargs)

            def batch_at(step, start=0, stop=None):
                batch = data.batch_at(step, start, stop)
                if step in steps:
                    batch["weights"] = batch["weights"].copy()
                    batch["weights"][2, 7] = np.inf
                return batch

            def iterate(first, start=0, stop=None):
                step = first
                while True:
                    yield batch_at(step, start, stop)
                    step += 1

            return Wrapped(data, batch_at=batch_at, iterate=iterate)

        monkeypatch.setattr(train.loop, "open_train", opened)

    return install


def test_a_loss_that_is_not_finite_stops_and_saves_the_batch(workshop, tmp_path, bad_batch):
    bad_batch({7})
    config = experiment(workshop, tmp_path / "run", checkpoint=dict(every_steps=3))
    with pytest.raises(UserError) as caught:
        run(config)
    file = tmp_path / "run" / "non_finite_step_7.npz"
    for part in ("Step 7", "loss nan", str(file), "row", "from step 6", "--non-finite skip"):
        assert part in str(caught.value)
    data = open_train(config.data, batch_size=8, sequence_length=64, seed=0)
    with np.load(file) as saved:
        assert int(saved["step"]) == 7 and list(saved["examples"]) == data.describe(7)
        np.testing.assert_array_equal(saved["tokens"], data.batch_at(7)["tokens"])
        assert np.isinf(saved["weights"][2, 7])
    assert load(config.directory).step == 6
    record = read_log(tmp_path / "run" / "metrics.jsonl")[-1]
    assert record["step"] == 7 and record["non_finite"] and record["loss"] is None


def test_skipping_leaves_that_update_out_and_goes_on(workshop, tmp_path, bad_batch, capsys):
    bad_batch({4})
    config = experiment(workshop, tmp_path / "run", non_finite="skip")
    result = run(config)
    assert result.finished and math.isfinite(result.summary["validation"]["loss"])
    losses = log_of(tmp_path / "run")
    assert [step for step, loss in losses.items() if loss is None] == [4]
    assert "step 4: loss or gradient not finite, update skipped" in capsys.readouterr().out


def test_skipping_without_end_is_an_error(workshop, tmp_path, bad_batch):
    bad_batch(set(range(3, 100)))
    config = experiment(
        workshop, tmp_path / "run", non_finite="skip", steps=60, evaluation=dict(every=0)
    )
    with pytest.raises(UserError, match="25 updates in a row were skipped"):
        run(config)


def signalled(monkeypatch, where, number):
    """Sends this process a signal while it opens data, reads batch 7, or evaluates."""
    send = lambda: os.kill(os.getpid(), number)

    def opened_train(*args, **kwargs):
        data = open_train(*args, **kwargs)
        if where == "opening":
            send()

        def iterate(first, start=0, stop=None):
            for step in range(first, 100):
                if where == "reading" and step == 7:
                    send()
                yield data.batch_at(step, start, stop)

        return Wrapped(data, iterate=iterate)

    def opened_validation(*args, **kwargs):
        data = open_validation(*args, **kwargs)

        def spread(count):
            for i, batch in enumerate(data.spread(count)):
                if where == "evaluating" and i == 1:
                    send()
                yield batch

        return Wrapped(data, spread=spread)

    def compiling(*args, **kwargs):
        built = train.step.make_trainer(*args, **kwargs)

        def step(state, batch):
            send()
            return built.step(state, batch)

        return dataclasses.replace(built, step=step) if where == "compiling" else built

    monkeypatch.setattr(train.loop, "open_train", opened_train)
    monkeypatch.setattr(train.loop, "open_validation", opened_validation)
    monkeypatch.setattr(train.loop, "make_trainer", compiling)


@pytest.mark.parametrize(
    "where, number, step",
    [
        ("opening", signal.SIGTERM, 0),
        ("compiling", signal.SIGTERM, 1),
        ("reading", signal.SIGINT, 8),
        ("evaluating", signal.SIGTERM, 6),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(
    workshop, finished, tmp_path, monkeypatch, capsys, where, number, step
):
    config = experiment(workshop, tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        signalled(patch, where, number)
        result = run(config)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert not result.finished and result.step == step
    out = capsys.readouterr().out
    assert "Stopped by " + {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[number] in out
    assert "Run the same command again" in out
    if step:
        assert load(config.directory).step == step
    # Going on gives what the undisturbed run gave.
    result = run(config)
    assert result.finished
    undisturbed = finished[1].directory
    assert log_of(config.directory) == log_of(undisturbed)
    assert log_of(config.directory, "validation") == log_of(undisturbed, "validation")
    same_params(params_of(config.directory, 12), params_of(undisturbed, 12))


def test_a_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop and stop.name == "Ctrl-C"
        os.kill(os.getpid(), signal.SIGINT)


def test_what_a_killed_save_left_is_ignored_and_removed(copied):
    partial = Path(copied.directory) / "checkpoints" / "13.orbax-checkpoint-tmp"
    (partial / "params").mkdir(parents=True)
    result = run(dataclasses.replace(copied, steps=14))
    assert result.finished and not partial.exists()
    assert load(copied.directory).step == 14


def test_the_best_evaluation_is_saved_even_between_checkpoints(workshop, tmp_path):
    config = experiment(
        workshop,
        tmp_path / "run",
        checkpoint=dict(every_steps=None, keep_last=1, keep_best=1),
        evaluation=dict(every=4, batches=3),
    )
    run(config)
    losses = log_of(tmp_path / "run", "validation")
    best = load(tmp_path / "run", step="best")
    assert best.meta["validation"]["loss"] == min(losses.values())


def test_saving_by_time(workshop, tmp_path):
    config = experiment(
        workshop,
        tmp_path / "run",
        checkpoint=dict(every_steps=None, every_minutes=0.0, keep_last=20, keep_best=0),
        steps=4,
        evaluation=dict(every=0),
    )
    run(config)
    saved = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [1, 2, 3, 4]


def test_the_profiler_records_its_window_and_programs_are_kept(workshop, tmp_path):
    config = experiment(workshop, tmp_path / "run", profile=dict(start=2, steps=2), steps=5)
    run(config)
    traces = list((tmp_path / "run" / "tensorboard").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 0
    assert any(Path(config.compilation_cache).iterdir())
    assert jax.config.jax_compilation_cache_dir is None


def test_packed_documents_and_a_moving_average_train(workshop, tmp_path):
    config = experiment(
        workshop, tmp_path / "run", data={}, ema_decay=0.9, steps=6, evaluation=dict(every=0)
    )
    config = dataclasses.replace(config, data=dataclasses.replace(workshop[0], packing="documents"))
    result = run(config)
    assert result.finished
    ema = load(config.directory)
    got = ema.params["inputs"]["embedding"]
    assert np.isfinite(np.asarray(got)).all()


def test_a_ttt_model_trains_on_packed_documents_with_room_for_them(workshop, tmp_path):
    data = dataclasses.replace(workshop[0], packing="documents")
    mixer = jaxmodels.TTTLinear(num_heads=2, max_documents=1)
    config = tiny_experiment(
        mixer,
        data=dataclasses.asdict(data),
        inner_lr={"start": 0.1, "warmup_steps": 2},
        steps=4,
        directory=str(tmp_path / "run"),
    )
    with pytest.raises(UserError, match=r"holds up to (\d+) documents.*max-documents \1"):
        run(config)
    assert not (tmp_path / "run").exists()
    model = dataclasses.replace(config.model, mixer=dataclasses.replace(mixer, max_documents=64))
    result = run(dataclasses.replace(config, model=model))
    assert result.finished
    records = read_log(tmp_path / "run" / "metrics.jsonl")
    scales = [r["inner_lr_scale"] for r in records if r["kind"] == "train"]
    np.testing.assert_allclose(scales, [0.1, 0.55, 1.0, 1.0], rtol=4e-3)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(log={"every": 0}), "log.every=0 must be at least 1"),
        (dict(evaluation={"batches": 0}), "evaluation.batches=0"),
        (dict(checkpoint={"every_steps": 0}), "checkpoint.every_steps=0"),
        (dict(checkpoint={"keep_last": 0}), "checkpoint.keep_last=0"),
        (dict(loss={"chunk": 0}), "loss.chunk=0"),
        (dict(sample={"top_p": 1.5}), "sample.top_p=1.5"),
        (dict(mixer="ttt", data={"packing": "documents"}), r"TTTLinear does not.*max-documents"),
        (dict(inner_lr={"start": 0.1, "warmup_steps": 3}), "Attention does not have"),
        (dict(mixer="ttt", inner_lr={"warmup_steps": -1}), "inner_lr.warmup_steps=-1"),
        (dict(loss={"reduction": "sum"}), "one of tokens, rows"),
    ],
)
def test_settings_that_would_fail_late_fail_at_once(tmp_path, changes, named):
    with pytest.raises(UserError, match=named):
        run(tiny_experiment(**changes, directory=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_too_small_is_named(workshop, tmp_path):
    inputs = jaxmodels.TokenInputs(vocab_size=128)
    config = experiment(workshop, tmp_path / "run", model={"inputs": inputs})
    with pytest.raises(UserError, match=r"256 tokens, the model knows 128.*vocab-size 256"):
        run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", None),
        ("cpu", None),
    ],
)
def test_peaks_are_only_claimed_for_devices_we_know(kind, peak):
    assert peak_flops(kind) == peak
