# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The command line: help, overrides, one message per mistake, and a run from start to
generation."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import tiny_experiment, write_text

import train.cli
from train.checkpoint import load
from train.cli import load_experiment, main, parse
from train.experiment import Experiment
from train.metrics import read_log

CONFIG = """
    import dataclasses
    from tiny import tiny_experiment, TextDataConfig

    def experiment():
        return tiny_experiment(
            {mixer!r},
            data=dict(train=({train!r},), validation=({validation!r},), cache_directory={cache!r}),
            directory={directory!r},
            evaluation=dict(every=20, batches=2),
            checkpoint=dict(every_steps=20),
            sample=dict(prompt="import ", max_new_tokens=20),
            baselines=True,
            steps=40,
        )
"""


def write_config(folder, mixer="attention"):
    data = write_text(folder)
    path = folder / "little.py"
    text = CONFIG.format(
        mixer=mixer,
        train=data.train[0],
        validation=data.validation[0],
        cache=data.cache_directory,
        directory=str(folder / "run"),
    )
    path.write_text(textwrap.dedent(text))
    return path


def environment(devices=1):
    """The environment of a program of its own with so many CPU devices."""
    changes = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
        "COLUMNS": "100",
    }
    return os.environ | changes


def command(*args, **options):
    """Runs `jaxmodels ARGS` as its own program."""
    program = [sys.executable, "-m", "train.cli", *map(str, args)]
    return subprocess.run(
        program, env=environment(), capture_output=True, text=True, timeout=300, **options
    )


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def fails(capsys, *args):
    """The one message of a command that must fail with exit code 2 and no trace."""
    try:
        code = main(list(map(str, args)))
    except SystemExit as stop:  # an option that the option parser itself refuses
        code = stop.code
    streams = capsys.readouterr()
    assert code == 2, streams
    assert "Traceback" not in streams.err
    return streams.err


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("train", "evaluate", "generate", "data"):
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    assert main([]) == 0 and main(["train", "--help"]) == 0
    assert "ttt_linear_bytes" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from train.cli import main; main(['--help']); "
        "sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'orbax', 'tyro', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_options_have_the_configs_defaults_and_the_docstrings_as_help(config, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", str(config), "--help"])
    assert stop.value.code == 0
    out = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for text in (
        "--optimizer.learning-rate FLOAT Peak learning rate. (default: 0.003)",
        "--model.mixer.num-heads INT",
        "--steps INT Optimizer steps in all. (default: 40)",
        "--optimizer.name {adamw,muon,lion,adafactor,sgd}",
    ):
        assert text in out


def test_overrides_are_typed_and_dotted():
    experiment = tiny_experiment("ttt")
    args = "--optimizer.learning-rate 0.5 --model.mixer.mini-batch-size 8 --mesh.fsdp 2 --baselines"
    args += " --optimizer.clip-norm None --data.train a.tokens b.tokens --evaluation.batches 3"
    got = parse(experiment, args.split(), "jaxmodels train x")
    assert got.optimizer.learning_rate == 0.5 and got.optimizer.clip_norm is None
    assert got.model.mixer.mini_batch_size == 8 and got.model.mixer.num_heads == 2
    assert got.mesh.fsdp == 2 and got.baselines is True
    assert got.data.train == ("a.tokens", "b.tokens") and got.evaluation.batches == 3
    assert got.optimizer.schedule == experiment.optimizer.schedule


def test_installed_configs_have_bare_names():
    for name in ("ttt_linear_bytes", "ttt_linear_bytes.py", "configs/ttt_linear_bytes.py"):
        assert isinstance(load_experiment(name), Experiment)


@pytest.mark.parametrize(
    "args, named",
    [
        (["trian"], ["'trian'", "did you mean 'train'?"]),
        (["train", "ttt_linear_byte"], ["ttt_linear_byte'", "did you mean 'ttt_linear_bytes'?"]),
        (["train", "nowhere/at_all.py"], ["nowhere/at_all.py", "no such file", "installed:"]),
        (["train", "--steps", "3"], ["name the config first"]),
        (["evaluate", "--checkpoint", "nowhere"], ["nowhere", "no folder"]),
        (["generate", "--checkpoint", "nowhere"], ["--prompt"]),
        (["generate", "--prompt", "x"], ["--checkpoint"]),
        (["data", "tokns"], ["'tokns'", "did you mean 'tokens'?"]),
    ],
)
def test_what_is_misspelt_or_missing_is_named(capsys, args, named):
    message = fails(capsys, *args)
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    "options, named",
    [
        (["--optimizer.lerning-rate", "1"], ["did you mean --optimizer.learning-rate?"]),
        (["--learning-rate", "1"], ["did you mean --optimizer.learning-rate?"]),
        (["--model.mixer.num-head=3"], ["did you mean --model.mixer.num-heads?"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--optimizer.name", "adam"], ["optimizer.name", "adam", "adamw"]),
        (["--model.d-model", "33"], ["d_model=33", "num_heads=2"]),
        (["--batch-size", "0"], ["batch_size=0"]),
        (["extra"], ["unexpected argument 'extra'"]),
        (["--mesh.data", "3"], ["needs 3 devices, but 8 are here", "--mesh.data 8"]),
        (["--data.train", "nowhere.tokens"], ["nowhere.tokens"]),
        (["--data.tokenizer", "nowhere.json", "--no-baselines"], ["nowhere.json"]),
    ],
)
def test_bad_options_of_train(config, capsys, options, named):
    message = fails(capsys, "train", config, *options)
    for part in named:
        assert part in message
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    "text, named",
    [
        ("def experiment(:", "line 1"),
        ("x = 1", "no function experiment()"),
        ("def experiment():\n    return 3", "returned a int"),
        ("def experiment():\n    return undefined", "line 2: NameError"),
        ("import train.experiment as e\n\ndef experiment():\n"
         "    return e.Experiment(name='x', model=None, steps=0)", "line 4: steps=0"),
    ],
)  # fmt: skip
def test_a_config_file_that_is_wrong_names_the_line(tmp_path, capsys, text, named):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    message = fails(capsys, "train", path)
    assert named in message and "wrong.py" in message


def test_an_empty_corpus_and_a_file_in_the_way(config, capsys, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    out = tmp_path / "empty.tokens"
    assert "empty" in fails(capsys, "data", "tokens", empty, "--output", out)
    assert not out.exists()
    (tmp_path / "run").write_text("a file, not a folder")
    assert str(tmp_path / "run") in fails(capsys, "train", config, "--mesh.fsdp", "8")
    assert (tmp_path / "run").read_text() == "a file, not a folder"


def test_without_the_extra_the_way_to_install_it_is_named(capsys, monkeypatch):
    monkeypatch.setattr(train.cli, "_installed", lambda name: name not in ("tyro", "grain"))
    message = fails(capsys, "train", "x")
    assert "grain, tyro" in message and "pip install 'jaxmodels[train]'" in message


def test_ctrl_c_before_training_is_one_line(capsys, monkeypatch):
    def interrupted(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(train.cli, "_data", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["data"]) == 130
    assert "Interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_bug_of_ours_keeps_its_trace(monkeypatch):
    monkeypatch.setattr(train.cli, "_data", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["data"])


def log_of(folder):
    keys = ("kind", "step", "loss", "grad_norm", "learning_rate", "bits_per_byte")
    return [tuple(r.get(k) for k in keys) for r in read_log(folder / "metrics.jsonl")]


def test_killed_and_continued_is_bit_for_bit_an_undisturbed_run(tmp_path):
    """SIGTERM in the middle, from outside, into a program of its own."""
    config = write_config(tmp_path, "ttt")
    options = ["--steps", "150", "--evaluation.every", "50", "--checkpoint.every-steps", "None"]
    program = [sys.executable, "-m", "train.cli", "train", str(config), *options]
    run = tmp_path / "run"
    with subprocess.Popen(
        program, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 240
        while len(read_log(run / "metrics.jsonl")) < 60 and process.poll() is None:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    stopped = int(re.search(r"Stopped by SIGTERM after (\d+) steps", out).group(1))
    assert 60 <= stopped < 150 and "Run the same command again" in out
    continued = command("train", config, *options)
    assert continued.returncode == 0, continued.stderr
    assert f"from step {stopped}" in continued.stdout and "Finished 150 steps" in continued.stdout
    undisturbed = command("train", config, *options, "--directory", tmp_path / "straight")
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert log_of(run) == log_of(tmp_path / "straight")
    assert len(log_of(run)) == 150 + 3
    for a, b in zip(
        jax.tree.leaves(load(run).params), jax.tree.leaves(load(tmp_path / "straight").params)
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_from_python_sources_to_generation(tmp_path, capsys, monkeypatch):
    """Train, evaluate, go on, generate, all through the command line, on the corpus `stdlib`."""
    config = write_config(tmp_path)
    one = "--mesh.fsdp 8 --data.train stdlib --data.validation stdlib --optimizer.schedule constant"
    one = [
        *one.split(),
        "--evaluation.batch-size",
        "64",
        "--compilation-cache",
        str(tmp_path / "c"),
    ]
    assert main(["train", str(config), *one]) == 0
    out = capsys.readouterr().out
    for text in ("Finished 40 steps", "bits per byte", "unigram", "order-3 n-gram", "loss.png",
                 "tensorboard --logdir", "Continuation of 'import '", "parameters"):  # fmt: skip
        assert text in out
    run = str(tmp_path / "run")
    assert main(["evaluate", "--checkpoint", run, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert values["step"] == 40
    assert abs(values["loss"] - summary["validation"]["loss"]) < 1e-5
    other = ["--validation", str(tmp_path / "validation.tokens"), "--sequence-length", "32"]
    assert main(["evaluate", "--checkpoint", run, "--step", "best", *other]) == 0
    assert "validation.tokens" in capsys.readouterr().out
    assert main(["train", str(config), *one, "--steps", "45"]) == 0
    assert "Finished 45 steps" in capsys.readouterr().out
    generate = ["generate", "--checkpoint", run, "--max-new-tokens", "8", "--temperature", "0"]
    assert main([*generate, "--prompt", "alpha be", "--prompt", "x"]) == 0
    both = capsys.readouterr().out
    assert "--- prompt 1\nalpha be" in both and "--- prompt 2\nx" in both
    monkeypatch.setattr(sys, "stdin", io.StringIO("alpha be"))
    assert main([*generate, "--prompt", "-"]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("alpha be") and alone.strip() in both
    assert "A prompt is empty" in fails(capsys, *generate, "--prompt", "")
    assert "top_p=2.0" in fails(capsys, *generate, "--prompt", "x", "--top-p", "2")
    assert "no checkpoint of step 3" in fails(capsys, "evaluate", "--checkpoint", run, "--step", 3)
    assert "--step tomorrow" in fails(capsys, "evaluate", "--checkpoint", run, "--step", "tomorrow")
    assert "another model" in fails(capsys, "train", config, *one, "--model.num-layers", "3")
