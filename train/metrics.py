# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""What a run writes while it trains: a JSON-lines file and a TensorBoard log always, and a progress
bar or lines.

Metrics stay on the device until the next step is under way, so the device never waits for the log.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.experiment import LogConfig

LOG_FILE = "metrics.jsonl"

# Dense bfloat16 peak of one device in FLOP/s, from the vendors' data sheets, by the start of
# `device_kind`.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of a device, None where we do not know it (then no MFU is shown)."""
    # The longest name first: "TPU v5 lite" must not be taken for a "TPU v5".
    for name in sorted(PEAK_FLOPS, key=len, reverse=True):
        if device_kind.lower().startswith(name.lower()):
            rest = device_kind[len(name) :]
            if not rest or not rest[0].isalnum():
                return PEAK_FLOPS[name]
    return None


def human(value: float, unit: str = "") -> str:
    """1234567 -> "1.23 M"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def human_bytes(value: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines log; a last line that a crash cut short is left out."""
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return records


def trim_log(path: Path, step: int, evaluated: bool) -> None:
    """Drops what a run that now goes on from `step` will write again.

    `evaluated`: whether the checkpoint of `step` holds its evaluation, which then is not repeated.
    """
    last = {"train": step - 1, "validation": step if evaluated else step - 1}
    kept = [r for r in read_log(path) if r.get("step", 0) <= last.get(r.get("kind", ""), step)]
    partial = path.with_name(path.name + ".tmp")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    partial.replace(path)


class Deferred:
    """Hands the metrics of step t - 1 to `write` once step t is under way."""

    def __init__(self, write):
        self._write, self._pending = write, None

    def __call__(self, step: int, metrics: dict[str, jax.Array]) -> None:
        pending, self._pending = self._pending, (step, metrics)
        self._hand_over(pending)

    def flush(self) -> None:
        """Hands over what is pending; waits for the device."""
        pending, self._pending = self._pending, None
        self._hand_over(pending)

    def _hand_over(self, pending) -> None:
        if pending is not None:
            step, metrics = pending
            values = jax.device_get(metrics)
            self._write(step, {name: np.asarray(value).item() for name, value in values.items()})


class RunLog:
    """The log of one run. On all processes but the first it only keeps time."""

    def __init__(
        self,
        directory: Path,
        config: LogConfig,
        *,
        first_step: int,
        steps: int,
        flops_per_token: float,
        unit: str,
    ):
        """`unit`: "bytes" adds bits per byte to losses, anything else shows nats only."""
        self._config, self._steps, self._unit = config, steps, unit
        self._flops_per_token = flops_per_token
        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind)
        self._peak = None if peak is None else peak * jax.device_count()
        self._primary = jax.process_index() == 0
        self._tokens = 0.0
        self._since: float | None = None
        self._file: Any = None
        self._board: Any = None
        self._bar: Any = None
        if not self._primary:
            return
        # These imports are slow, and only a run needs them.
        from tensorboard.summary import Writer
        from tqdm import tqdm

        self._file = (directory / LOG_FILE).open("a")
        self._board = Writer(str(directory / "tensorboard"))
        bar = config.progress_bar
        if bar is None:
            bar = sys.stderr.isatty()
        if bar:
            self._bar = tqdm(total=steps, initial=first_step, unit="step", dynamic_ncols=True)

    def message(self, text: str) -> None:
        """A line for people."""
        if not self._primary:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def step_done(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a finished step; written at every `log.every`-th and at the last."""
        now = time.perf_counter()
        if self._since is None:  # the first step paid for compilation
            self._since = now
        else:
            self._tokens += values["weight"]
        if self._bar is not None:
            self._bar.update(1)
        last = step == self._steps - 1
        if step % self._config.every and not last and not values["non_finite"]:
            return
        record: dict[str, Any] = {"kind": "train", "step": step}
        for name in ("loss", "z_loss", "grad_norm", "learning_rate", "inner_lr_scale"):
            if name in values:
                record[name] = _finite(values[name])
        record["tokens"] = values["weight"]
        record["non_finite"] = bool(values["non_finite"])
        elapsed = now - self._since
        if self._tokens and elapsed > 0:
            rate = self._tokens / elapsed
            record["tokens_per_second"] = rate
            record["flops_per_second"] = rate * self._flops_per_token
            if self._peak is not None:
                record["mfu"] = record["flops_per_second"] / self._peak
            self._tokens, self._since = 0.0, now
        self._write(record)
        self._show(record)

    def validation(self, step: int, values: dict[str, float]) -> None:
        """The result of an evaluation after `step` updates."""
        self._write({"kind": "validation", "step": step} | values)
        text = f"validation at step {step}: loss {values['loss']:.4f}"
        if values.get("bits_per_byte") is not None:
            text += f", {values['bits_per_byte']:.4f} bits per byte"
        self.message(text)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside does not count as training time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.perf_counter() - start

    def close(self) -> None:
        """Ends the bar and closes the files."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()
            self._board.close()
        self._file = self._board = self._bar = None

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name in ("kind", "step", "non_finite") or value is None:
                continue
            self._board.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        self._board.flush()

    def _show(self, record: dict[str, Any]) -> None:
        parts = {"loss": f"{math.nan if record['loss'] is None else record['loss']:.4f}"}
        if self._unit == "bytes" and record["loss"] is not None:
            parts["bits/byte"] = f"{record['loss'] / math.log(2):.3f}"
        if record["grad_norm"] is not None:
            parts["grad"] = f"{record['grad_norm']:.2f}"
        parts["lr"] = f"{record['learning_rate']:.2e}"
        if "tokens_per_second" in record:
            parts["speed"] = human(record["tokens_per_second"], "tok/s")
            parts["compute"] = human(record["flops_per_second"], "FLOP/s")
        if "mfu" in record:
            parts["MFU"] = f"{record['mfu']:.1%}"
        if self._bar is not None:  # a bar has less room than a line
            short = [f"loss {parts['loss']}", f"lr {parts['lr']}", parts.get("speed", "")]
            self._bar.set_postfix_str("  ".join(short).strip(), refresh=False)
        elif self._primary:
            shown = "  ".join(f"{name} {value}" for name, value in parts.items())
            print(f"step {record['step']:>{len(str(self._steps))}}  {shown}", flush=True)


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def bytes_per_device(shapes: Any) -> int:
    """Bytes of the train state on one device (the fullest, all shards being equal)."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def table(rows: dict[str, str]) -> str:
    """Two aligned columns."""
    width = max(map(len, rows))
    return os.linesep.join(f"  {name:<{width}}  {text}" for name, text in rows.items())
