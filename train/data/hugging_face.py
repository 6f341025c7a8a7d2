# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Hugging Face data sets as token files: `hf:DATASET:SPLIT:COLUMN`.

DATASET is a name on the hub, with `@CONFIG` for one of its configurations, or a local folder:
one that `save_to_disk` wrote, or one of data files. It is tokenized once into the cache; after
that a data set of the hub is used as it was read then, without the network or the package, and a
local folder is read again when its files change.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from train.data.token_file import TokenFile, open_cached
from train.data.tokenizer import Tokenizer
from train.errors import UserError

PREFIX = "hf:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The parts of `hf:DATASET:SPLIT:COLUMN`."""

    dataset: str
    config: str | None
    split: str
    column: str


def parse(text: str) -> Source:
    """The parts of a source. Raises UserError when one is missing."""
    parts = text.removeprefix(PREFIX).rsplit(":", 2)
    if not text.startswith(PREFIX) or len(parts) != 3 or not all(parts):
        raise UserError(
            f"{text!r} is not hf:DATASET:SPLIT:COLUMN, as in hf:roneneldan/TinyStories:train:text "
            "or hf:Salesforce/wikitext@wikitext-2-raw-v1:train:text."
        )
    dataset, config = parts[0], None
    if "@" in dataset and not Path(dataset).exists():
        dataset, config = dataset.rsplit("@", 1)
    return Source(dataset=dataset, config=config, split=parts[1], column=parts[2])


def open_hugging_face(text: str, *, tokenizer: Tokenizer, cache_directory: str) -> TokenFile:
    """The token file of a source, made when the cache lacks it.

    Raises UserError when the package `datasets` is missing, or the data set, split or column does
    not exist or holds something other than text.
    """
    source = parse(text)
    folder = Path(source.dataset)
    files = sorted(f for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else []
    stats = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(repr((source, stats, tokenizer.fingerprint)).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{source.dataset}-{source.split}").strip("-.")
    path = Path(cache_directory) / f"hf-{name[-80:]}-{key}.tokens"
    return open_cached(str(path), lambda: _texts(source, text), tokenizer=tokenizer, what=text)


def _texts(source: Source, name: str) -> Iterator[str]:
    data = _load(source, name)
    if source.column not in data.column_names:
        raise UserError(
            f"{name}: there is no column {source.column!r}; it has {', '.join(data.column_names)}."
        )
    for number, row in enumerate(data.select_columns([source.column])):
        value = row[source.column]
        if value is None:
            continue
        if not isinstance(value, str):
            raise UserError(
                f"{name}: row {number} of column {source.column!r} holds {type(value).__name__}, "
                "not text."
            )
        yield value


def _load(source: Source, name: str):
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name} needs the package 'datasets': pip install 'jaxmodels[hf]'."
        ) from None
    folder = Path(source.dataset)
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            data = datasets.load_from_disk(source.dataset)
            if hasattr(data, "column_names") and not isinstance(data, dict):
                return data  # a single split; its name does not stand in the folder
            if source.split not in data:
                raise UserError(f"{name}: there is no split {source.split!r}; it has {[*data]}.")
            return data[source.split]
        return datasets.load_dataset(source.dataset, source.config, split=source.split)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds, most of them about the name
        raise UserError(
            f"Cannot load {name}: {type(error).__name__}: {str(error).strip() or 'no message'}"
        ) from error
