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
    """Whether the official axes come in reverse order, e.g. [out, in]; ours are [in, out]."""

    def to_ours(self, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return (value.T if self.transpose else value).reshape(shape)

    def to_official(self, value: np.ndarray) -> np.ndarray:
        if self.transpose:
            return value.reshape(self.official_shape[::-1]).T
        return value.reshape(self.official_shape)


def import_weights(model: Model, table: Iterable[Row], weights: Mapping[str, Any]) -> Params:
    """Official tensors -> our nested dict of numpy arrays, in the dtypes of our parameters.

    Raises ValueError listing every missing, surplus and misshaped name at once, and every tensor
    whose values our dtype cannot hold exactly (bfloat16 and float16 fit float32); nothing is
    guessed.
    """
    rows = list(table)
    shapes = model.param_shapes
    faults = [f"missing {row.official}" for row in rows if row.official not in weights]
    known = {row.official for row in rows}
    faults += [f"surplus {name}" for name in weights if name not in known]
    found = {name: np.asarray(weights[name]) for name in weights if name in known}
    for row in (row for row in rows if row.official in found):
        value, dtype = found[row.official], _lookup(shapes, row.ours).dtype
        if value.shape != row.official_shape:
            faults.append(f"misshaped {row.official}: {value.shape}, not {row.official_shape}")
        elif not np.can_cast(value.dtype, dtype):
            faults.append(f"inexact {row.official}: {value.dtype} does not fit {dtype}")
    if faults:
        raise ValueError(
            f"these weights do not fit the config ({len(faults)} faults):\n  " + "\n  ".join(faults)
        )
    params: Params = {}
    for row in rows:
        target = _lookup(shapes, row.ours)
        value = found[row.official]
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
