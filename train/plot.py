# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""A picture of the loss curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAIN, VALIDATION = "#9fb3c8", "#d64545"
YARDSTICKS = ("#b0782a", "#3e7b52", "#6b4fa0")


def plot_curves(
    records: list[dict[str, Any]],
    path: Path,
    *,
    title: str,
    bits_per_byte: bool,
    yardsticks: dict[str, float] | None = None,
) -> None:
    """Draws training and validation loss against steps into a PNG.

    `records` are those of `metrics.jsonl`. Losses are in bits per byte for a byte-level model, else
    in nats per token; `yardsticks` (name -> the same unit) become horizontal lines.
    """
    # No pyplot: a library function must not touch the caller's figures or choose a backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scale = 1 / math.log(2) if bits_per_byte else 1.0
    points = {
        kind: np.array(
            [
                (r["step"], r["loss"] * scale)
                for r in records
                if r["kind"] == kind and r["loss"] is not None
            ]
        ).reshape(-1, 2)
        for kind in ("train", "validation")
    }
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train, validation = points["train"], points["validation"]
    axes.plot(*train.T, color=TRAIN, linewidth=1.0, label="training, one batch", zorder=2)
    if len(train) >= 20:
        window = max(len(train) // 25, 3)
        kernel = np.ones(window) / window
        smooth = np.convolve(train[:, 1], kernel, "valid")
        offset = (window - 1) // 2
        steps = train[offset : offset + len(smooth), 0]
        label = f"training, mean of {window} logged"
        axes.plot(steps, smooth, color="#486581", linewidth=1.6, label=label, zorder=3)
    if len(validation):
        label = f"validation (at the end {validation[-1, 1]:.3f})"
        axes.plot(
            *validation.T,
            color=VALIDATION,
            linewidth=1.8,
            marker="o",
            markersize=4,
            label=label,
            zorder=4,
        )
    for (name, value), color in zip((yardsticks or {}).items(), YARDSTICKS):
        axes.axhline(value, color=color, linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            f"{name} {value:.3f}",
            xy=(0.0, value),  # on the left, where the curves are still far above
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            ha="left",
            va="bottom",
            color=color,
            fontsize=9,
        )
    everything = np.concatenate(
        [train[:, 1], validation[:, 1], np.array(list((yardsticks or {}).values()))]
    )
    if len(everything):
        # The first steps of a random model would squeeze the rest: start a little above the 98th
        # percentile.
        low, high = everything.min(), np.percentile(everything, 98)
        pad = max(0.08 * (high - low), 0.02)
        axes.set_ylim(low - pad, high + pad)
    axes.set_title(title, loc="left", color=INK, fontsize=12)
    axes.set_xlabel("updates", color=INK)
    axes.set_ylabel("bits per byte" if bits_per_byte else "loss (nats per token)", color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    partial = path.with_name(path.name + ".tmp")
    figure.savefig(partial, format="png")
    partial.replace(path)
