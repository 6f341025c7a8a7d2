# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Config dataclasses to JSON and back.

A dataclass becomes an object whose key "type" names its class; tuples become lists and come back as
tuples. Only dataclasses of our own packages are ever created: a file cannot run code.
"""

import dataclasses
import difflib
import hashlib
import importlib
import json
from typing import Any

from train.errors import UserError

PACKAGES = ("jaxmodels", "train", "pallas_kernels", "configs")
"""Packages whose dataclasses may be named in a file."""


def to_json(value: Any) -> Any:
    """A config as JSON types. Raises UserError for a value that would not come back equal."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if "type" in fields:
            raise UserError(f"{cls.__name__} has a field 'type', a name that config files reserve.")
        return {"type": f"{cls.__module__}.{cls.__qualname__}"} | fields
    raise UserError(
        f"A config holds {value!r} of type {type(value).__name__}; config files know None, bool, "
        "int, float, str, tuples and config dataclasses."
    )


def from_json(data: Any, where: str = "config") -> Any:
    """The config that `to_json` wrote. Raises UserError naming the place that cannot be read."""
    if isinstance(data, list):
        return tuple(from_json(item, f"{where}[{i}]") for i, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    cls = _find_class(data.get("type"), where)
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    values = {}
    for key, item in data.items():
        if key == "type":
            continue
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise UserError(
                f"{where}: {cls.__name__} has no field {key!r}"
                + (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else "; was it written by another version?"
                )
            )
        values[key] = from_json(item, f"{where}.{key}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {cls.__name__} refuses these values: {error}") from None


def _find_class(name: Any, where: str) -> type:
    module, _, cls_name = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if module.split(".")[0] not in PACKAGES:
        raise UserError(
            f"{where}: the type {name!r} is not in {', '.join(PACKAGES)}; only our own config "
            "types can be read back from a file."
        )
    try:
        cls = getattr(importlib.import_module(module), cls_name)
    except (ImportError, AttributeError):
        raise UserError(
            f"{where}: the type {name!r} does not exist in this version of jaxmodels."
        ) from None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module):
        raise UserError(f"{where}: {name!r} is not a config dataclass.")
    return cls


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON as {dotted name: value}; lists stay whole."""
    if not isinstance(data, dict):
        return {prefix: data}
    flat: dict[str, Any] = {}
    for key, item in data.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """{dotted name: (old, new)} of every field that differs between two configs in JSON form."""
    old, new = flatten(old), flatten(new)
    names = list(old) + [name for name in new if name not in old]
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}


def fingerprint(data: Any) -> str:
    """sha256 of JSON data in canonical form."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
