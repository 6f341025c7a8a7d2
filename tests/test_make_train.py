# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""`make train`, shortened: it trains, evaluates, saves, resumes and generates."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_make_train_end_to_end(tmp_path):
    run = tmp_path / "run"
    # The environment that runs the tests serves; the flag that gives the tests 8 devices must not.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "MAKEFLAGS")}
    small = (
        f"--directory {run} --data.cache-directory {tmp_path / 'data'} --optimizer.warmup-steps 2 "
        "--evaluation.every 4 --evaluation.batches 2 --checkpoint.every-steps 4 "
        "--model.num-layers 1 --sample.max-new-tokens 20 --batch-size 16 --sequence-length 128"
    )

    def make_train(steps):
        command = ["make", "train", f"VENV={sys.prefix}", f"ARGS={small} --steps {steps}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = make_train(6)
    assert "Finished 6 steps" in first and "validation at step 4" in first
    second = make_train(9)
    assert f"Going on from {run}/checkpoints/6" in second
    assert "Finished 9 steps" in second
    for yardstick in ("unigram", "order-3 n-gram"):
        assert f"{yardstick} " in second
    assert "Continuation of" in second
    assert "finished" in make_train(9)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))

    def jaxmodels(*command):
        program = pathlib.Path(sys.prefix) / "bin" / "jaxmodels"
        done = subprocess.run(
            [program, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "bits per byte" in jaxmodels("evaluate", "--checkpoint", str(run))
    prompts = ("--prompt", "import os", "--prompt", "def f(")
    assert "import os" in jaxmodels("generate", "--checkpoint", str(run), *prompts)
