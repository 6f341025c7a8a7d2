# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Yardsticks: interpolated n-gram models of bytes (Witten and Bell 1991, method C).

    P_0(c)   = 1 / 256
    P_k(c|h) = (n(h c) + t(h) P_{k-1}(c|h')) / (n(h) + t(h))

where h is the k - 1 bytes before c, h' is h without its first byte, n counts occurrences in the
training text and t(h) is the number of different bytes seen after h. An unseen context falls back
to the shorter one. No byte has probability 0. The order is the length of the n-gram: order 1 is the
unigram model, order 3 predicts a byte from the two before it. The text is preceded by zero bytes,
the end of a document.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from train.data.text import TrainData, ValidationData
from train.errors import UserError

BLOCK = 2**22
"""Bytes counted or scored at one time."""
MAX_ORDER = 3
"""Counts are dense tables of 256 ** order."""


@dataclasses.dataclass(frozen=True)
class NGram:
    """Counts of the n-grams of each order 1..order."""

    counts: tuple[np.ndarray, ...]
    """(256 ** k,) int64 for k = 1, 2, ..: occurrences of each k-gram, its first byte the most
    significant digit."""

    @property
    def order(self) -> int:
        return len(self.counts)

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """P(last byte | bytes before it).   grams: (N,) integer codes of `order` bytes -> (N,)
        float64."""
        p = np.full(len(grams), 1 / 256)
        for k, count in enumerate(self.counts, 1):
            table = count.reshape(-1, 256)
            total, types = table.sum(1), (table > 0).sum(1)
            code = grams % 256**k
            context = code // 256
            n, t = total[context], types[context]
            p = np.where(n > 0, (count[code] + t * p) / np.maximum(n + t, 1), p)
        return p

    def bits_per_byte(self, text: np.ndarray) -> float:
        """Mean of -log2 P over every byte of `text` (N,) uint8."""
        if not len(text):
            raise UserError("There is no text to score.")
        # Equal n-grams have equal probability, so each kind is scored once.
        counts = count_ngrams([text], self.order)
        grams = np.flatnonzero(counts)
        return float(-(counts[grams] * np.log2(self.probabilities(grams))).sum() / len(text))


def count_ngrams(texts: Iterable[np.ndarray], order: int) -> np.ndarray:
    """Occurrences of each n-gram.   texts: arrays (N,) uint8, each preceded by zero bytes ->
    (256 ** order,) int64."""
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(f"order={order} must be between 1 and {MAX_ORDER}")
    counts = np.zeros(256**order, np.int64)
    for text in texts:
        for start in range(0, len(text), BLOCK):
            first = start - (order - 1)
            block = np.asarray(text[max(first, 0) : start + BLOCK]).astype(np.int32)
            block = np.concatenate([np.zeros(max(-first, 0), np.int32), block])
            code = np.zeros(len(block) - (order - 1), np.int32)
            for k in range(order):
                code = code * 256 + block[k : k + len(code)]
            np.add(counts, np.bincount(code, minlength=len(counts)), out=counts)
    return counts


def fit(texts: Iterable[np.ndarray], order: int) -> NGram:
    """The model of `order` of byte arrays (N,) uint8."""
    counts = [count_ngrams(texts, order)]
    while len(counts) < order:  # summed over the first byte: the counts of the shorter n-gram
        counts.append(counts[-1].reshape(256, -1).sum(0))
    if not counts[0].any():
        raise UserError("There is no text to fit an n-gram model to.")
    return NGram(counts=tuple(reversed(counts)))


def prefix(model: NGram, order: int) -> NGram:
    """The model of a lower order that is part of `model`."""
    return NGram(counts=model.counts[:order])


def yardsticks(train: TrainData, validation: ValidationData) -> dict[str, float]:
    """Bits per byte of the unigram and the order-3 model, fitted to the training bytes, on exactly
    the targets of `validation`. Byte tokens only."""
    if train.tokenizer.name != "bytes":
        raise UserError("The n-gram yardsticks compare bytes: they need data.tokenizer='bytes'.")
    model = fit((rows.file.tokens for rows in train.rows), MAX_ORDER)
    text = validation.targets_bytes()
    return {
        "unigram": prefix(model, 1).bits_per_byte(text),
        "order-3 n-gram": model.bits_per_byte(text),
    }
