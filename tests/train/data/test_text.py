# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Batches: pure in (seed, step), the same for any number of hosts, each token where it belongs."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import load_tokenizer, open_token_file, open_train, open_validation
from train.data import token_file as token_file_module
from train.data.mixture import Interleave
from train.data.rows import pack
from train.data.token_file import write_documents
from train.errors import UserError
from train.experiment import TextDataConfig

BYTES = load_tokenizer("bytes")
PACKINGS = ("windows", "documents")


def make_documents(seed, count=30, longest=90):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, count)
    return ["".join(map(chr, rng.integers(97, 123, n))) for n in sizes]


@pytest.fixture
def config(token_file):
    a = token_file(make_documents(0), "a.tokens")
    b = token_file(make_documents(1, count=50), "b.tokens")
    return TextDataConfig(train=(a, b), validation=(a,))


def open_packed(config, packing="windows", seed=0, batch_size=4, length=16, **changes):
    config = dataclasses.replace(config, packing=packing, **changes)
    return open_train(config, batch_size=batch_size, sequence_length=length, seed=seed)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_a_part_of_validation_is_spread_over_the_whole(config):
    """A short evaluation sees all of the text, not its first document."""
    data = open_validation(config, batch_size=2, sequence_length=16)
    every = list(data)
    assert len(every) == len(data) >= 12
    some = list(data.spread(4))
    assert len(some) == 4
    for k, batch in enumerate(some):
        assert_same(batch, every[k * len(every) // 4])
    assert len(list(data.spread(10**6))) == len(every)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("weights", [None, (0.7, 0.3)])
def test_a_batch_depends_on_seed_and_step_alone(config, packing, weights):
    data = open_packed(config, packing, train_weights=weights)
    again = open_packed(config, packing, train_weights=weights)
    assert data.fingerprint == again.fingerprint
    batches = [data.batch_at(step) for step in range(12)]
    for step in (11, 3, 0, 7):  # any order, another object
        assert_same(again.batch_at(step), batches[step])
    for first in (0, 5):
        iterator = again.iterate(first)
        for step in range(first, 12):
            assert_same(next(iterator), batches[step])
        iterator.close()
    far = 10**9  # a seek costs nothing
    iterator = data.iterate(far)
    assert_same(next(iterator), again.batch_at(far))
    iterator.close()
    assert (
        open_packed(config, packing, seed=1).batch_at(0)["tokens"] != batches[0]["tokens"]
    ).any()


@pytest.mark.parametrize("packing", PACKINGS)
def test_shapes_and_types(config, packing):
    batch = open_packed(config, packing).batch_at(0)
    names = ["tokens", "targets", "weights"]
    names += ["segment_ids", "positions"] if packing == "documents" else []
    assert list(batch) == names
    for name, value in batch.items():
        assert value.shape == (4, 16)
        assert value.dtype == (np.float32 if name == "weights" else np.int32)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_the_parts_of_hosts_make_up_the_global_batch(config, packing, hosts):
    data = open_packed(config, packing, batch_size=6)
    each = 6 // hosts
    iterators = [
        open_packed(config, packing, batch_size=6).iterate(3, h * each, (h + 1) * each)
        for h in range(hosts)
    ]
    for step in (3, 4, 5):
        parts = [next(iterator) for iterator in iterators]
        whole = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        assert_same(whole, data.batch_at(step))
    for iterator in iterators:
        iterator.close()


def test_rows_out_of_range(config):
    data = open_packed(config)
    for step, start, stop in ((-1, 0, 4), (0, 0, 5), (0, 3, 2)):
        with pytest.raises(ValueError, match="need step >= 0"):
            data.batch_at(step, start, stop)


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_holds_each_row_once_and_the_next_is_in_another_order(config, packing):
    data = open_packed(config, packing, batch_size=1)
    n = data.rows_per_epoch
    assert n == sum(len(rows) for rows in data.rows)

    def epoch(e):
        return [line for step in range(e * n, (e + 1) * n) for line in data.describe(step)]

    first, second = epoch(0), epoch(1)
    assert len(set(first)) == n
    assert set(first) == set(second)
    assert first != second
    other_seed = open_packed(config, packing, batch_size=1, seed=1)
    assert [other_seed.describe(step)[0] for step in range(n)] not in (first, second)


@pytest.mark.parametrize(
    "weights, expected",
    [
        (None, [(1, 46), (0, 84), (0, 6), (0, 90), (0, 0), (1, 4), (0, 87), (0, 54)]),
        ((0.75, 0.25), [(0, 96), (1, 3), (0, 80), (0, 10), (0, 69), (1, 0), (0, 37), (0, 91)]),
    ],
)
def test_order_of_rows_is_pinned(token_file, weights, expected):
    """A checkpoint resumes with the same rows in another release, of ours or of grain."""
    files = token_file(["x" * 15] * 100, "x.tokens"), token_file(["y" * 15] * 50, "y.tokens")
    config = TextDataConfig(train=files, train_weights=weights)
    data = open_packed(config, batch_size=8)
    assert [(data.rows.index(r), i) for r, i in data._rows_at(20, 0, None)] == expected


def test_windows_are_the_text_shifted_by_one(config):
    data = open_packed(config, batch_size=8)
    stream = {rows.file.path: np.asarray(rows.file.tokens) for rows in data.rows}
    batch = data.batch_at(2)
    for b, (rows, index) in enumerate(data._rows_at(2, 0, None)):
        tokens = np.concatenate([[0], stream[rows.file.path]])
        np.testing.assert_array_equal(batch["tokens"][b], tokens[index * 16 : index * 16 + 16])
        np.testing.assert_array_equal(batch["targets"][b], tokens[index * 16 + 1 :][:16])
    assert (batch["weights"] == 1).all()


def test_describe_names_the_place(config):
    data = open_packed(config, batch_size=2)
    batch = data.batch_at(4)
    for b, line in enumerate(data.describe(4)):
        path, rest = line.split(" row ")
        first = int(rest.split("tokens ")[1].split("..")[0])
        file = open_token_file(path)
        np.testing.assert_array_equal(file.tokens[first : first + 16], batch["targets"][b])
        document = int(rest.rsplit(" ", 1)[1])
        assert ([0, *file.ends])[document] <= first < file.ends[document]


# --- mixtures


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.integers(0, 10**12),
)
def test_mixture_proportions_are_exact(parts, start):
    weights = [p / 1000 for p in parts]
    mixture = Interleave(weights)
    period, shares = sum(parts), [p / sum(parts) for p in parts]
    # At each n, source i has given rows 0 .. count_i - 1, with count_i near n share_i.
    counts = None
    for n in range(start, start + 60):
        source, index = mixture[n]
        assert abs(index - n * shares[source]) < (0.51 if len(parts) == 2 else 2)
        counts = counts or {}
        assert counts.setdefault(source, index) == index  # rows of a source without gaps
        counts[source] = index + 1
    whole = [mixture[n] for n in range(start, start + period)] if period < 2000 else []
    for i, part in enumerate(parts):
        if whole:
            assert sum(source == i for source, _ in whole) == part


def test_mixture_of_real_sources(config):
    data = open_packed(config, batch_size=10, train_weights=(0.7, 0.3))
    for step in (0, 1, 50):
        paths = [line.split(" row ")[0] for line in data.describe(step)]
        assert [paths.count(path) for path in config.train] == [7, 3]
    # Each source goes through its own epochs without repeating a row.
    n = len(data.rows[0])
    lines = [line for step in range(n // 7) for line in data.describe(step)]
    from_first = [line for line in lines if line.startswith(config.train[0])]
    assert len(set(from_first)) == len(from_first) == n // 7 * 7


# --- packing


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 25))
def test_pack_places_every_token_once(sizes, length):
    ends = np.cumsum(sizes)
    first, starts, stops = pack(ends, length)
    begins = ends - sizes
    used = np.zeros(ends[-1], int)
    for start, stop in zip(starts, stops):
        used[start:stop] += 1
        document = np.searchsorted(ends, start, side="right")
        assert begins[document] <= start < stop <= ends[document]  # one document per piece
        assert (start - begins[document]) % length == 0  # cut into row-long pieces and a rest
    assert (used == 1).all()
    rows = [int((stops - starts)[a:b].sum()) for a, b in itertools.pairwise(first)]
    assert all(0 < r <= length for r in rows)
    assert first[0] == 0 and first[-1] == len(starts)
    # Best fit: no two rows would fit into one.
    assert len(rows) < 2 or sum(sorted(rows)[:2]) > length


@settings(max_examples=40)
@given(
    st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=25), st.integers(2, 20)
)
def test_packed_rows(tmp_path_factory, documents, length):
    path = str(tmp_path_factory.mktemp("p") / "a.tokens")
    write_documents(documents, path, tokenizer=BYTES)
    config = TextDataConfig(train=(path,), validation=(path,), packing="documents")
    validation = open_validation(config, batch_size=3, sequence_length=length)
    pieces = []
    for batch in validation:
        for b in range(3):
            segments = batch["segment_ids"][b]
            used = int((segments > 0).sum())
            assert (segments[:used] > 0).all() and (np.diff(segments[:used]) >= 0).all()
            assert (batch["weights"][b] == (segments > 0)).all()
            for s in range(1, segments.max() + 1):
                here = segments == s
                size = int(here.sum())
                assert size
                np.testing.assert_array_equal(batch["positions"][b][here], np.arange(size))
                inputs, targets = batch["tokens"][b][here], batch["targets"][b][here]
                np.testing.assert_array_equal(inputs[1:], targets[:-1])
                assert (targets[:-1] != 0).all()  # a document's end is the end of its segment
                pieces.append((int(inputs[0]), bytes(targets.tolist())))
    # The pieces are the documents: those that follow an end token start one, the others go on.
    expected = []
    for text in documents:
        data = text.encode() + b"\0"
        for start in range(0, len(data), length):
            expected.append((data[start - 1] if start else 0, data[start : start + length]))
    assert sorted(pieces) == sorted(expected)
    assert 0 < validation.fill_rate <= 1
    total = sum(batch["weights"].sum() for batch in validation)
    assert total == validation.num_tokens == validation.num_bytes


def test_fill_rate_is_the_share_of_weights(config):
    data = open_packed(config, "documents", batch_size=1, length=64)
    total = sum(data.batch_at(step)["weights"].sum() for step in range(data.rows_per_epoch))
    assert data.fill_rate == pytest.approx(total / (64 * data.rows_per_epoch))
    assert data.fill_rate > 0.9
    assert open_packed(config).fill_rate == 1


# --- validation


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("batch_size, length", [(1, 7), (4, 16), (64, 33), (3, 5000)])
def test_validation_covers_each_byte_once(config, packing, batch_size, length):
    config = dataclasses.replace(config, packing=packing, validation=config.train)
    data = open_validation(config, batch_size=batch_size, sequence_length=length)
    batches = list(data)
    assert len(batches) == len(data)
    targets = np.concatenate([b["targets"][b["weights"] == 1] for b in batches])
    assert set(np.unique(np.concatenate([b["weights"] for b in batches]))) <= {0.0, 1.0}
    expected = np.concatenate([open_token_file(path).tokens for path in config.train])
    if packing == "windows":
        np.testing.assert_array_equal(targets, expected)
    else:
        np.testing.assert_array_equal(np.sort(targets), np.sort(expected))
    np.testing.assert_array_equal(data.targets_bytes(), expected)
    assert data.num_bytes == data.num_tokens == len(expected)
    for first, second in zip(batches, data, strict=True):
        assert_same(first, second)
        assert first["tokens"].shape == (batch_size, length)


def test_bytes_of_text_do_not_depend_on_the_tokenizer(token_file, bpe):
    documents = ["the cat sat on the mat", "naïve 猫"]
    num_bytes, num_tokens = set(), set()
    for i, tokenizer in enumerate(("bytes", bpe)):
        path = token_file(documents, f"{i}.tokens", tokenizer)
        config = TextDataConfig(train=(path,), validation=(path,), tokenizer=tokenizer)
        data = open_validation(config, batch_size=2, sequence_length=8)
        num_bytes.add(data.num_bytes)
        num_tokens.add(data.num_tokens)
        assert sum(b["weights"].sum() for b in data) == data.num_tokens
        ends = np.concatenate([b["targets"][b["weights"] == 1] for b in data])
        assert (ends == data.tokenizer.end_of_document).sum() == 2
    assert num_bytes == {sum(len(d.encode()) + 1 for d in documents)}
    assert len(num_tokens) == 2
    with pytest.raises(UserError, match="does not hold bytes"):
        data.targets_bytes()


# --- fingerprints and mistakes


def test_fingerprint_changes_with_what_changes_the_batches(config, token_file):
    base = open_packed(config).fingerprint
    other = token_file(make_documents(2), "c.tokens")
    changed = [
        open_packed(config, "documents"),
        open_packed(config, length=8),
        open_packed(config, batch_size=2),
        open_packed(config, train_weights=(0.5, 0.5)),
        open_packed(config, train_weights=(0.6, 0.4)),
        open_packed(config, train=(config.train[0], other)),
        open_packed(config, train=config.train[::-1]),
        open_packed(config, train=config.train[:1]),
    ]
    assert len({base, *(data.fingerprint for data in changed)}) == 1 + len(changed)
    # Not with where a file lies.
    moved = token_file(make_documents(0), "moved.tokens")
    assert open_packed(config, train=(moved, config.train[1])).fingerprint == base


def test_mistakes(config, token_file, tmp_path, bpe):
    def fails(message, **changes):
        with pytest.raises(UserError, match=message):
            open_packed(config, **changes)

    fails("data.train is empty", train=())
    fails("1 numbers for 2 sources", train_weights=(1.0,))
    fails("every weight must be above 0", train_weights=(1.0, 0.0))
    fails("every weight must be above 0", train_weights=(1.0, float("nan")))
    fails("no token file .*stdlb", train=("stdlb",))
    fails("holds 3 tokens, less than one row of sequence_length=16", train=(token_file(["ab"]),))
    fails("made with the tokenizer bytes .*but data.tokenizer is", tokenizer=bpe)
    fails("packing='rows'", packing="rows")
    with pytest.raises(UserError, match=r"data\.validation is empty"):
        open_validation(dataclasses.replace(config, validation=()), batch_size=1, sequence_length=4)
    # A whole document of three tokens is a row when packing documents, and a validation row.
    short = token_file(["ab"], "short.tokens")
    assert open_packed(config, "documents", train=(short,)).rows_per_epoch == 1
    changed = dataclasses.replace(config, validation=(short,))
    (batch,) = open_validation(changed, batch_size=2, sequence_length=16)
    assert batch["weights"].sum() == 3


def test_a_token_out_of_range_is_noticed(tmp_path, bpe, monkeypatch):
    """A file too large to be hashed at each start is checked where it is read."""
    path = str(tmp_path / "a.tokens")
    tokenizer = load_tokenizer(bpe)
    write_documents(["the cat sat on the mat"] * 9, path, tokenizer=tokenizer)
    with open(path, "r+b") as file:
        file.seek(token_file_module.HEADER_BYTES + 2 * 20)
        file.write(np.array([60_000], "<u2").tobytes())
    config = TextDataConfig(train=(path,), validation=(path,), tokenizer=bpe)
    with pytest.raises(UserError, match="damaged"):
        open_validation(config, batch_size=4, sequence_length=8)
    monkeypatch.setattr(token_file_module, "VERIFY_BYTES", 0)
    data = open_validation(config, batch_size=4, sequence_length=8)
    with pytest.raises(UserError, match=r"holds the token 60000 near 16, .* has 275 tokens"):
        list(data)
    train = open_train(config, batch_size=30, sequence_length=8, seed=0)
    iterator = train.iterate(0)
    with pytest.raises(UserError, match="60000"):  # from the reading thread too
        next(iterator)
    iterator.close()


def test_stdlib_is_a_source(tmp_path, bpe):
    config = TextDataConfig(cache_directory=str(tmp_path))
    data = open_train(config, batch_size=2, sequence_length=64, seed=0)
    validation = open_validation(config, batch_size=64, sequence_length=512)
    assert data.batch_at(0)["tokens"].shape == (2, 64)
    assert sum(b["weights"].sum() for b in validation) == validation.num_bytes > 100_000
    assert data.rows[0].file.path != validation.rows[0].file.path
