# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Two real processes over jax.distributed give what one process gives, and stop together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from measure import max_rel
from tiny import write_text

from train.metrics import read_log
from train.serialize import to_json

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import json, sys
import jax

count, index, port, config = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, index)
from train.loop import train
from train.serialize import from_json

train(from_json(json.loads(open(config).read())))
"""


def start(count, index, port, config):
    """One process of `count`, with its share of 8 CPU devices."""
    flags = f"--xla_force_host_platform_device_count={8 // count}"
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(count), str(index), str(port), str(config)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(count, config, stop_when=None):
    """Runs all processes to their end; [(stdout, stderr)]. A signal goes to the last one alone."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [start(count, index, port, config) for index in range(count)]
    try:
        if stop_when is not None:
            deadline = time.monotonic() + 200
            while not stop_when() and time.monotonic() < deadline:
                assert all(p.poll() is None for p in processes), "ended before the signal"
                time.sleep(0.05)
            processes[-1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs):
        assert process.returncode == 0, err[-3000:]
    return outputs


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    from tiny import tiny_experiment

    data = write_text(tmp_path)

    def config(name, steps):
        experiment = tiny_experiment(
            data=dict(train=data.train, validation=data.validation),
            mesh=dict(data=2, fsdp=2, tensor=2),
            optimizer=dict(schedule="constant"),
            evaluation=dict(every=20, batches=2),
            checkpoint=dict(every_steps=40),
            directory=str(tmp_path / name),
            baselines=True,
            steps=steps,
        )
        path = tmp_path / f"{name}{steps}.json"
        path.write_text(json.dumps(to_json(experiment)))
        return path

    def losses(name):
        records = read_log(tmp_path / name / "metrics.jsonl")
        return {(r["kind"], r["step"]): r["loss"] for r in records}

    run(1, config("one", 60))
    # Two processes; a signal to the second alone stops both at one step, then one process goes on.
    two = tmp_path / "two" / "metrics.jsonl"
    (first_out, _), (second_out, _) = run(
        2, config("two", 60), stop_when=lambda: len(read_log(two)) >= 25
    )
    stopped = int(re.search(r"after (\d+) steps", first_out).group(1))
    assert 25 <= stopped < 60 and "Stopped" not in second_out
    (out, _), _ = run(2, config("two", 60))
    assert f"from step {stopped}" in out and "2 processes" in out and "Finished 60 steps" in out
    assert losses("two").keys() == losses("one").keys()
    assert max_rel(list(losses("two").values()), list(losses("one").values())) < 1e-5
    # Another number of processes feeds the data from here on.
    run(1, config("two", 65))
    run(2, config("one", 65))
    assert losses("two").keys() == losses("one").keys()
    assert max_rel(list(losses("two").values()), list(losses("one").values())) < 1e-5
