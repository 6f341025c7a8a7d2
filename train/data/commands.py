# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The commands under `jaxmodels data`: `tokens`, `stdlib` and `show`."""

import collections
import dataclasses
from typing import Literal

import tyro

from train.data import stdlib_corpus
from train.data.rows import DocumentRows, make_rows, read_batch
from train.data.text import open_source
from train.data.token_file import write_tokens
from train.data.tokenizer import load_tokenizer
from train.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensCommand:
    """Turns text into a memory-mapped token file for training."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Text files (a document each), .jsonl files (a document per line), folders, glob patterns."""
    output: str
    """The token file to write."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizers` JSON file."""
    field: str = "text"
    """Key of the text in each JSON line."""
    overwrite: bool = False
    """Replace an existing output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibCommand:
    """Builds the corpus `stdlib` and says what is in it."""

    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizers` JSON file."""
    cache_directory: str = "runs/data"
    """Where its token files are kept."""
    files: bool = False
    """Also list every document with its size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Prints a row as the model sees it."""

    source: tyro.conf.Positional[str]
    """A token file, `stdlib`, or `hf:DATASET:SPLIT:COLUMN`."""
    row: int = 0
    """Which row, in the order of the file."""
    part: Literal["train", "validation"] = "train"
    """Which part of `stdlib`."""
    packing: Literal["windows", "documents"] = "windows"
    """How documents become rows."""
    sequence_length: int = 512
    """Tokens per row."""
    tokenizer: str = "bytes"
    """The one that made the token file."""
    cache_directory: str = "runs/data"
    """Where token files built on demand are kept."""


def run_tokens(command: TokensCommand) -> None:
    """Writes the token file and prints what is in it."""
    file = write_tokens(
        command.inputs,
        command.output,
        tokenizer=load_tokenizer(command.tokenizer),
        field=command.field,
        overwrite=command.overwrite,
    )
    print(
        f"{file.path}: {file.num_documents:,} documents, {file.num_tokens:,} tokens "
        f"({file.tokens.dtype}), {file.num_bytes / file.num_tokens:.2f} bytes per token, "
        f"sha256 {file.fingerprint[:12]}"
    )


def run_stdlib(command: StdlibCommand) -> None:
    """Builds both parts and prints their sizes, and the folders that hold most of the text."""
    tokenizer = load_tokenizer(command.tokenizer)
    documents = stdlib_corpus.read_documents()
    sizes = {path: len(text.encode()) for path, text in documents.items()}
    for part, paths in stdlib_corpus.split(documents).items():
        file = stdlib_corpus.open_stdlib(
            part, tokenizer=tokenizer, cache_directory=command.cache_directory
        )
        print(
            f"{part}: {file.num_documents:,} documents, {sum(sizes[p] for p in paths):,} bytes, "
            f"{file.num_tokens:,} tokens, in {file.path}"
        )
        if command.files:
            for path in paths:
                print(f"  {sizes[path]:>9,}  {path}")
    folders: collections.Counter[str] = collections.Counter()
    for path, size in sizes.items():
        top, _, rest = path.partition("/")
        folders[f"{top}/" if rest else "(top folder)"] += size
    print("largest folders:")
    for folder, size in folders.most_common(8):
        print(f"  {size:>9,}  {folder}")


def run_show(command: ShowCommand) -> None:
    """Prints the text of a row, segment by segment."""
    tokenizer = load_tokenizer(command.tokenizer)
    if command.sequence_length < 1:
        raise UserError(f"--sequence-length {command.sequence_length} must be at least 1.")
    file = open_source(command.source, command.part, tokenizer, command.cache_directory)
    rows = make_rows(file, command.sequence_length, command.packing, partial=True)
    if not 0 <= command.row < len(rows):
        raise UserError(f"--row {command.row}: {file.path} has the rows 0..{len(rows) - 1}.")
    batch = read_batch([(rows, command.row)], command.sequence_length, command.packing)
    stretches = rows.stretches(command.row)
    used = sum(stop - start for start, stop in stretches)
    print(f"{file.path}: row {command.row} of {len(rows):,}, {used} of {rows.length} positions")
    if isinstance(rows, DocumentRows):
        print(f"fill rate over all rows: {rows.fill_rate:.2%}")
    at = 0
    for segment, (start, stop) in enumerate(stretches, 1):
        name = f"segment {segment}, " if command.packing == "documents" else ""
        print(f"--- {name}targets {start}..{stop - 1} of the file")
        print(tokenizer.decode(batch["targets"][0, at : at + stop - start].tolist()))
        at += stop - start
