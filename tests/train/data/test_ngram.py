# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The yardsticks against a slow count, written from the formula."""

import collections
import math

import numpy as np
import pytest

from train.data import ngram, open_train, open_validation
from train.errors import UserError
from train.experiment import TextDataConfig


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def slow_probability(train, context, byte):
    """Witten-Bell, by its recursive definition."""
    if context is None:
        return 1 / 256
    size = len(context) + 1
    padded = b"\0" * (size - 1) + train
    grams = collections.Counter(padded[i : i + size] for i in range(len(train)))
    after = {g: n for g, n in grams.items() if g[:-1] == context}
    lower = slow_probability(train, context[1:] if context else None, byte)
    n, t = sum(after.values()), len(after)
    return (grams[context + bytes([byte])] + t * lower) / (n + t) if n else lower


TRAIN = "abracadabra, abracadabra. to be or not to be: that is the question"
TEXT = "abra or not? zebra"


@pytest.mark.parametrize("order", [1, 2, 3])
def test_against_a_slow_count(order):
    model = ngram.fit([as_bytes(TRAIN)], order)
    padded = b"\0" * (order - 1) + TEXT.encode()
    bits = [
        -math.log2(slow_probability(TRAIN.encode(), padded[i : i + order - 1], byte))
        for i, byte in enumerate(TEXT.encode())
    ]
    assert model.bits_per_byte(as_bytes(TEXT)) == pytest.approx(np.mean(bits), rel=1e-12)


@pytest.mark.parametrize("context", ["ab", "be", "zz", "\0\0", "q\0"])
def test_probabilities_are_positive_and_sum_to_one(context):
    model = ngram.fit([as_bytes(TRAIN)], 3)
    high, low = context.encode()
    p = model.probabilities(np.arange(256) + 256 * (256 * high + low))
    assert (p > 0).all()
    assert p.sum() == pytest.approx(1, rel=1e-12)


def test_lower_orders_are_part_of_the_model():
    model = ngram.fit([as_bytes(TRAIN)], 3)
    for order in (1, 2):
        alone = ngram.fit([as_bytes(TRAIN)], order)
        part = ngram.prefix(model, order)
        for a, b in zip(part.counts, alone.counts, strict=True):
            np.testing.assert_array_equal(a, b)


def test_blocks_do_not_change_the_counts(monkeypatch):
    text = np.random.default_rng(0).integers(0, 4, 1000).astype(np.uint8)
    whole = ngram.count_ngrams([text, text[:1], text[:0]], 2)
    assert whole.sum() == 1001
    monkeypatch.setattr(ngram, "BLOCK", 7)
    np.testing.assert_array_equal(ngram.count_ngrams([text, text[:1], text[:0]], 2), whole)


def test_a_uniform_text_costs_its_entropy():
    text = np.random.default_rng(0).integers(0, 256, 400_000).astype(np.uint8)
    assert ngram.fit([text], 1).bits_per_byte(text[:50_000]) == pytest.approx(8, abs=0.01)


def test_yardsticks_score_the_targets_of_the_validation(token_file, tmp_path):
    train, other = token_file([TRAIN]), token_file(["the cat"], "b.tokens")
    data = TextDataConfig(
        train=(train, other), validation=(token_file([TEXT, "not"], "v.tokens"), other)
    )
    validation = open_validation(data, batch_size=2, sequence_length=4)
    opened = open_train(data, batch_size=1, sequence_length=4, seed=0)
    values = ngram.yardsticks(opened, validation)
    assert list(values) == ["unigram", "order-3 n-gram"]
    targets = as_bytes(TEXT + "\0not\0the cat\0")
    for name, order in (("unigram", 1), ("order-3 n-gram", 3)):
        model = ngram.fit([as_bytes(TRAIN + "\0"), as_bytes("the cat\0")], order)
        assert values[name] == pytest.approx(model.bits_per_byte(targets), rel=1e-12)
    np.testing.assert_array_equal(validation.targets_bytes(), targets)


def test_errors(token_file, bpe):
    with pytest.raises(UserError, match="no text to fit"):
        ngram.fit([as_bytes("")], 2)
    with pytest.raises(UserError, match="no text to score"):
        ngram.fit([as_bytes("a")], 2).bits_per_byte(as_bytes(""))
    with pytest.raises(ValueError, match="order=4"):
        ngram.fit([as_bytes("a")], 4)
    path = token_file(["the cat"], tokenizer=bpe)
    data = TextDataConfig(train=(path,), validation=(path,), tokenizer=bpe)
    opened = open_train(data, batch_size=1, sequence_length=1, seed=0)
    validation = open_validation(data, batch_size=1, sequence_length=4)
    with pytest.raises(UserError, match=r"need data\.tokenizer='bytes'"):
        ngram.yardsticks(opened, validation)
