# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Batches of text for training and validation.

A training batch is a pure function of (seed, step): row b of step s is element s * batch_size + b
of one endless sequence, which grain shuffles anew each epoch and interleaves over the sources. So
resuming is a seek, and a host can read any part of the global batch.
"""

import bisect
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from train.data import hugging_face, stdlib_corpus
from train.data.mixture import Interleave
from train.data.rows import Batch, DocumentRows, Rows, make_rows, read_batch
from train.data.token_file import TokenFile, open_token_file
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.errors import UserError

if TYPE_CHECKING:
    from train.experiment import TextDataConfig

READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
"""Threads that read batches, and batches read ahead. Reading a row is copying it from the page
cache, so two threads serve thousands of rows per second."""


class TrainData:
    """Endless shuffled batches; see `open_train`."""

    def __init__(
        self,
        rows: Sequence[Rows],
        weights: Sequence[float] | None,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        packing: str,
        tokenizer: Tokenizer,
    ):
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.packing = packing
        self.rows = tuple(rows)
        self.fingerprint = _fingerprint(rows, weights, batch_size, sequence_length, packing)
        self._order = _order([len(r) for r in rows], weights, seed)
        self._order[0]  # grain sets up its counters on first use, which threads must not race for

    @property
    def rows_per_epoch(self) -> int:
        """Rows of all sources."""
        return sum(len(rows) for rows in self.rows)

    @property
    def fill_rate(self) -> float:
        """Share of positions that are not padding, over all sources."""
        return _fill_rate(self.rows)

    def batch_at(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows [start, stop) of the global batch of `step`, see `read_batch`. Pure."""
        return read_batch(self._rows_at(step, start, stop), self.sequence_length, self.packing)

    def iterate(self, first_step: int, start: int = 0, stop: int | None = None) -> Any:
        """Iterator of `batch_at` for first_step, first_step + 1, .., read ahead by threads.

        Starts without reading what comes before. `.close()` ends the threads.
        """
        steps = grain.MapDataset.range(first_step, sys.maxsize)
        batches = steps.map(lambda step: self.batch_at(step, start, stop))
        return iter(batches.to_iter_dataset(READ_AHEAD))

    def describe(self, step: int) -> list[str]:
        """Where each row of the batch comes from."""
        lines = []
        for rows, index in self._rows_at(step, 0, None):
            stretches = rows.stretches(index)
            shown = ", ".join(f"{a}..{b - 1}" for a, b in stretches[:4])
            more = f", and {len(stretches) - 4} more" if len(stretches) > 4 else ""
            document = int(np.searchsorted(rows.file.ends, stretches[0][0], side="right"))
            lines.append(
                f"{rows.file.path} row {index}: tokens {shown}{more}, from document {document}"
            )
        return lines

    def _rows_at(self, step: int, start: int, stop: int | None) -> list[tuple[Rows, int]]:
        stop = self.batch_size if stop is None else stop
        if step < 0 or not 0 <= start <= stop <= self.batch_size:
            raise ValueError(
                f"step={step}, rows [{start}, {stop}): need step >= 0 and rows in "
                f"[0, {self.batch_size})"
            )
        first = step * self.batch_size
        chosen = (self._order[first + b] for b in range(start, stop))
        return [(self.rows[source], index) for source, index in chosen]


class ValidationData:
    """Every token of the validation sources as a target exactly once; see `open_validation`."""

    def __init__(
        self,
        rows: Sequence[Rows],
        *,
        batch_size: int,
        sequence_length: int,
        packing: str,
        tokenizer: Tokenizer,
    ):
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.packing = packing
        self.rows = tuple(rows)
        self.fingerprint = _fingerprint(rows, None, batch_size, sequence_length, packing)
        self.num_tokens = sum(r.file.num_tokens for r in rows)
        """Targets of weight 1 over all batches, end-of-document tokens included."""
        self.num_bytes = sum(r.file.num_bytes for r in rows)
        """Bytes of text that the targets stand for, the end of a document counting as one. So bits
        per byte, total nll / (ln 2 * num_bytes), compare across tokenizers."""

    def __len__(self) -> int:
        """Number of batches."""
        return -(-sum(len(r) for r in self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the start; the last is filled up with rows of weight 0."""
        return self.spread(len(self))

    def spread(self, count: int) -> Iterator[Batch]:
        """`count` batches (at most all) taken evenly over the whole data, in order.

        The first few batches alone would be a few documents and say little about the rest.
        """
        every = ((rows, i) for rows in self.rows for i in range(len(rows)))
        total = len(self)
        count = min(count, total)
        wanted = {k * total // count for k in range(count)}
        for number in range(total):
            chosen = list(itertools.islice(every, self.batch_size))
            if number in wanted:
                padding = [None] * (self.batch_size - len(chosen))
                yield read_batch([*chosen, *padding], self.sequence_length, self.packing)

    @property
    def fill_rate(self) -> float:
        """Share of positions that are not padding, in rows that hold text."""
        return _fill_rate(self.rows)

    def targets_bytes(self) -> np.ndarray:
        """All targets (num_tokens,) uint8 in the order of the text. Byte tokens only."""
        return np.concatenate([_bytes(rows.file) for rows in self.rows])


def open_source(source: str, part: str, tokenizer: Tokenizer, cache_directory: str) -> TokenFile:
    """The token file of one source of a config.

    Args:
      source: `stdlib`, `hf:DATASET:SPLIT:COLUMN`, or the path of a token file.
      part: "train" or "validation", which part of `stdlib`.

    Raises:
      UserError: when it is missing, damaged, or made by another tokenizer.
    """
    if source == "stdlib":
        return stdlib_corpus.open_stdlib(part, tokenizer=tokenizer, cache_directory=cache_directory)
    if source.startswith(hugging_face.PREFIX):
        return hugging_face.open_hugging_face(
            source, tokenizer=tokenizer, cache_directory=cache_directory
        )
    return open_token_file(source, tokenizer)


def open_train(
    data: "TextDataConfig", *, batch_size: int, sequence_length: int, seed: int
) -> TrainData:
    """The training data of a config.

    Without `train_weights` the rows of all sources are shuffled together, so an epoch holds each
    row once. With weights each source has its own epochs and the sources are interleaved in exact
    proportion, see `mixture.Interleave`.

    Raises:
      UserError: for a source that is missing, damaged, too short or made by another tokenizer, and
        for weights that do not fit the sources.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    weights = data.train_weights
    if not data.train:
        raise UserError("data.train is empty: name at least one training source.")
    if weights is not None:
        if len(weights) != len(data.train):
            raise UserError(
                f"data.train_weights has {len(weights)} numbers for {len(data.train)} sources in "
                "data.train. Give one per source, or none."
            )
        if not all(0 < w < float("inf") for w in weights):
            raise UserError(f"data.train_weights={weights}: every weight must be above 0.")
    rows = [
        make_rows(
            open_source(source, "train", tokenizer, data.cache_directory),
            sequence_length,
            data.packing,
            partial=False,
        )
        for source in data.train
    ]
    return TrainData(
        rows,
        weights,
        batch_size=batch_size,
        sequence_length=sequence_length,
        seed=seed,
        packing=data.packing,
        tokenizer=tokenizer,
    )


def open_validation(
    data: "TextDataConfig", *, batch_size: int, sequence_length: int
) -> ValidationData:
    """The validation data of a config: all of it, in order, the same each time.

    Raises:
      UserError: for a source that is missing, damaged or made by another tokenizer.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    if not data.validation:
        raise UserError("data.validation is empty: name at least one validation source.")
    rows = [
        make_rows(
            open_source(source, "validation", tokenizer, data.cache_directory),
            sequence_length,
            data.packing,
            partial=True,
        )
        for source in data.validation
    ]
    return ValidationData(
        rows,
        batch_size=batch_size,
        sequence_length=sequence_length,
        packing=data.packing,
        tokenizer=tokenizer,
    )


def _order(lengths: Sequence[int], weights: Sequence[float] | None, seed: int) -> grain.MapDataset:
    """The endless sequence of (source, row)."""
    if weights is not None:
        each = [_shuffled(n, seed, i).map(_with_source(i)) for i, n in enumerate(lengths)]
        return grain.MapDataset.select_from_datasets(each, Interleave(weights))
    offsets = [0, *itertools.accumulate(lengths)]

    def locate(row: int) -> tuple[int, int]:
        source = bisect.bisect_right(offsets, row) - 1
        return source, row - offsets[source]

    return _shuffled(offsets[-1], seed, 0).map(locate)


def _with_source(source: int):
    return lambda row: (source, row)


def _shuffled(length: int, seed: int, source: int) -> grain.MapDataset:
    # grain seeds epoch e with seed + e. Hashing keeps seed 1 from being seed 0 an epoch later.
    digest = hashlib.sha256(f"{seed} {source}".encode()).digest()
    order = grain.MapDataset.range(length).shuffle(seed=int.from_bytes(digest[:4], "big"))
    return order.repeat()


def _fingerprint(
    rows: Sequence[Rows],
    weights: Sequence[float] | None,
    batch_size: int,
    sequence_length: int,
    packing: str,
) -> str:
    settings = {
        "version": 1,
        "contents": [r.file.fingerprint for r in rows],
        "tokenizers": [r.file.tokenizer_fingerprint for r in rows],
        "weights": weights and list(weights),
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "packing": packing,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _fill_rate(rows: Sequence[Rows]) -> float:
    used = sum(
        r.file.num_tokens
        if isinstance(r, DocumentRows)
        else min(r.file.num_tokens, len(r) * r.length)
        for r in rows
    )
    return used / sum(len(r) * r.length for r in rows)


def _bytes(file: TokenFile) -> np.ndarray:
    if file.tokens.dtype != np.uint8:
        raise UserError(f"{file.path} does not hold bytes; byte models need data.tokenizer=bytes.")
    return file.tokens
