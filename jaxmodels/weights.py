# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Weight tables: which official tensor is which of our parameters, for import and export alike."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from jaxmodels.model import Model, Params

Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True)
class Row:
    """One official tensor and its place in our parameters."""

    official: str
    """Official name."""
    ours: tuple[str, ...]
    """Path in the nested dict of parameters."""
    layer: int | None
    """Index on our leading layer axis; None outside the blocks."""
    official_shape: tuple[int, ...]
    transpose: bool = False
    """Whether the official matrix is [out, in]; ours are [in, out]."""

    def to_ours(self, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return (value.T if self.transpose else value).reshape(shape)

    def to_official(self, value: np.ndarray) -> np.ndarray:
        if self.transpose:
            return value.reshape(self.official_shape[::-1]).T
        return value.reshape(self.official_shape)


def import_weights(model: Model, table: Iterable[Row], weights: Mapping[str, Any]) -> Params:
    """Official tensors -> our nested dict of numpy arrays.

    Raises ValueError listing every missing, surplus and misshaped name at once; nothing is guessed.
    """
    rows = list(table)
    faults = [f"missing {row.official}" for row in rows if row.official not in weights]
    known = {row.official for row in rows}
    faults += [f"surplus {name}" for name in weights if name not in known]
    faults += [
        f"misshaped {row.official}: {np.shape(weights[row.official])}, not {row.official_shape}"
        for row in rows
        if row.official in weights and np.shape(weights[row.official]) != row.official_shape
    ]
    if faults:
        raise ValueError(
            f"these weights do not fit the config ({len(faults)} faults):\n  " + "\n  ".join(faults)
        )
    shapes = model.param_shapes
    params: Params = {}
    for row in rows:
        target = _lookup(shapes, row.ours)
        value = np.asarray(weights[row.official])
        shape = target.shape if row.layer is None else target.shape[1:]
        node = params
        for key in row.ours[:-1]:
            node = node.setdefault(key, {})
        if row.layer is None:
            node[row.ours[-1]] = row.to_ours(value, shape).astype(target.dtype)
        else:
            stack = node.setdefault(row.ours[-1], np.zeros(target.shape, target.dtype))
            stack[row.layer] = row.to_ours(value, shape)
    return params


def export_weights(table: Iterable[Row], params: Params) -> dict[str, np.ndarray]:
    """Our parameters -> official tensors by name; the exact inverse of `import_weights`."""
    out = {}
    for row in table:
        value = np.asarray(_lookup(params, row.ours))
        out[row.official] = row.to_official(value if row.layer is None else value[row.layer])
    return out


def _lookup(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def per_layer(num_layers: int, rows: Callable[[int], Iterable[Row]]) -> list[Row]:
    """Rows of every layer."""
    return [row for layer in range(num_layers) for row in rows(layer)]


def expect(part: Any, kind: type[Part], layout: str) -> Part:
    """`part`, if it is of the kind that an official layout can hold; ValueError otherwise."""
    if not isinstance(part, kind):
        raise ValueError(
            f"{layout} has no names for {type(part).__name__}; it holds {kind.__name__}"
        )
    return part


def from_config(config: Mapping[str, Any], name: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of an official config, with an error that names it where it is missing."""
    if name in config:
        return config[name]
    if default is dataclasses.MISSING:
        raise ValueError(f"the official config lacks {name!r}; it has {sorted(config)}")
    return default
