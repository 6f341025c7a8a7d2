# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Parameters as one safetensors file, names joined with slashes: safe to read from anyone."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxmodels.model import Model, Params


def flatten(tree: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """{"blocks": {"mixer": {"wq": x}}} -> {"blocks/mixer/wq": x}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inner = flatten(value, separator)
            out |= {f"{key}{separator}{name}": leaf for name, leaf in inner.items()}
        else:
            out[key] = value
    return out


def save_params(path: str | os.PathLike, params: Params) -> None:
    """Writes the parameters; an existing file is replaced only once the new one is complete."""
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    save_file({name: np.ascontiguousarray(x) for name, x in flatten(params).items()}, part)
    part.replace(path)


def load_params(path: str | os.PathLike, model: Model) -> Params:
    """Reads what `save_params` wrote, as numpy arrays.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is corrupt, or its names or shapes are not the model's (all of them
        listed).
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    wanted = flatten(model.param_shapes)
    faults = [f"missing {name}" for name in wanted if name not in found]
    faults += [f"surplus {name}" for name in found if name not in wanted]
    faults += [
        f"misshaped {name}: {found[name].shape}, expected {wanted[name].shape}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    if faults:
        raise ValueError(f"{path} holds another model:\n  " + "\n  ".join(faults))
    params: Params = {}
    for name, value in found.items():
        *path_to, leaf = name.split("/")
        node = params
        for key in path_to:
            node = node.setdefault(key, {})
        node[leaf] = value
    return params
