# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Rows of token files, by index.

A row's targets are one or more stretches of a token file; its inputs are the tokens just before
them. Since every document ends with an end token, and the first document is taken to follow one,
the input to the first target of a document is always an end token: it marks the start.

* `WindowRows`: row r has the targets tokens[r T : (r + 1) T], whatever documents they belong to.
* `DocumentRows`: whole documents placed side by side. Each stretch is a segment numbered from 1,
  its positions start at 0, and 0 marks the padding at the end of the row. A document longer than a
  row is cut into row-long pieces and a rest.

Either way each token of the file is a target at most once, and in validation exactly once.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from train.data.token_file import TokenFile
from train.errors import UserError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class WindowRows:
    """Consecutive windows of the file; `partial` keeps the shorter last one."""

    file: TokenFile
    length: int
    partial: bool = False

    def __len__(self) -> int:
        n = self.file.num_tokens
        return -(-n // self.length) if self.partial else n // self.length

    def stretches(self, row: int) -> list[tuple[int, int]]:
        """[(start, stop)] of the targets of a row in the file."""
        start = row * self.length
        return [(start, min(start + self.length, self.file.num_tokens))]


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentRows:
    """Documents packed into rows by `pack`."""

    file: TokenFile
    length: int

    def __len__(self) -> int:
        return len(self._plan[0]) - 1

    def stretches(self, row: int) -> list[tuple[int, int]]:
        """[(start, stop)] of the targets of a row in the file, one per segment."""
        first, starts, stops = self._plan
        pieces = slice(first[row], first[row + 1])
        return list(zip(starts[pieces].tolist(), stops[pieces].tolist()))

    @property
    def fill_rate(self) -> float:
        """Share of positions that are not padding."""
        return self.file.num_tokens / (len(self) * self.length)

    @property
    def most_documents(self) -> int:
        """Documents in the row that holds most of them."""
        return int(np.diff(self._plan[0]).max())

    @functools.cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return pack(np.asarray(self.file.ends), self.length)


Rows = WindowRows | DocumentRows


def pack(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A plan that packs documents into rows: best fit, longest piece first.

    Depends on the document lengths alone. Takes about a microsecond per document.

    Args:
      ends: (N,) int64, the index just past each document.
      length: positions of a row.

    Returns:
      first (rows + 1,), starts and stops (pieces,), all int64: row r holds the pieces
      first[r] .. first[r + 1] - 1, piece i is tokens[starts[i] : stops[i]].
    """
    begins = np.concatenate([[0], ends[:-1]])
    # Cut each document into ceil(size / length) pieces.
    pieces = -(-(ends - begins) // length)
    document = np.repeat(np.arange(len(ends)), pieces)
    within = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = begins[document] + within * length
    stops = np.minimum(starts + length, ends[document])

    sizes = stops - starts
    order = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(order), np.int64)
    whole = int((sizes == length).sum())  # these come first and fill a row each
    row_of[order[:whole]] = np.arange(whole)
    rows = whole
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]  # by the room left in them
    rooms = 0  # bit r is set where open_rows[r] is not empty
    for piece, size in zip(order[whole:].tolist(), sizes[order[whole:]].tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # the smallest that fits
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row, rows = length, rows, rows + 1
        row_of[piece] = row
        if room > size:
            open_rows[room - size].append(row)
            rooms |= 1 << (room - size)

    by_row = np.argsort(row_of, kind="stable")  # pieces of a row stay in the order of the file
    first = np.searchsorted(row_of[by_row], np.arange(rows + 1))
    return first, starts[by_row], stops[by_row]


def make_rows(file: TokenFile, length: int, packing: str, *, partial: bool) -> Rows:
    """The rows of a file.

    Args:
      packing: "windows" or "documents".
      partial: keep a last window shorter than a row (validation).

    Raises:
      UserError: when windows are asked for and the file is shorter than one.
    """
    if packing == "documents":
        return DocumentRows(file, length)
    if packing != "windows":
        raise UserError(f"data.packing={packing!r}; one of 'windows', 'documents'.")
    rows = WindowRows(file, length, partial)
    if not len(rows):
        raise UserError(
            f"{file.path} holds {file.num_tokens:,} tokens, less than one row of "
            f"sequence_length={length}. Give more text, or shorter rows."
        )
    return rows


def read_batch(rows: Sequence[tuple[Rows, int] | None], length: int, packing: str) -> Batch:
    """Reads rows into arrays.

    Args:
      rows: (rows, index) of each row of the batch; None for a row of padding only.

    Returns:
      tokens, targets (B, T) int32, weights (B, T) float32, and with packing "documents" also
      segment_ids, positions (B, T) int32. At padding the weight is 0.

    Raises:
      UserError: for a token beyond the vocabulary, which a damaged file may hold.
    """
    shape = (len(rows), length)
    batch = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }
    if packing == "documents":
        batch |= {"segment_ids": np.zeros(shape, np.int32), "positions": np.zeros(shape, np.int32)}
    for b, item in enumerate(rows):
        if item is None:
            continue
        source, index = item
        file = source.file
        at = 0
        for segment, (start, stop) in enumerate(source.stretches(index), 1):
            size = stop - start
            here = slice(at, at + size)
            targets = file.tokens[start:stop]
            if (largest := int(targets.max())) >= file.vocab_size:
                raise UserError(
                    f"{file.path} holds the token {largest} near {start:,}, but its tokenizer has "
                    f"{file.vocab_size:,} tokens. The file is damaged: make it again."
                )
            batch["targets"][b, here] = targets
            batch["tokens"][b, at] = file.tokens[start - 1] if start else file.end_of_document
            batch["tokens"][b, at + 1 : at + size] = targets[:-1]
            batch["weights"][b, here] = 1
            if packing == "documents":
                batch["segment_ids"][b, here] = segment
                batch["positions"][b, here] = np.arange(size)
            at += size
    return batch
