# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""`hf:` sources: with a stand-in for the package, and with the package where it is installed."""

import sys
import types

import pytest

from train.data import load_tokenizer, open_train, open_validation
from train.data.hugging_face import open_hugging_face, parse
from train.errors import UserError
from train.experiment import TextDataConfig

BYTES = load_tokenizer("bytes")
TABLE = {"text": ["first text", None, "", "second"], "number": [1, 2, 3, 4]}


class FakeDataset:
    def __init__(self, table):
        self.table = table
        self.column_names = list(table)

    def select_columns(self, names):
        return FakeDataset({name: self.table[name] for name in names})

    def __iter__(self):
        return (dict(zip(self.table, row)) for row in zip(*self.table.values()))


@pytest.fixture
def fake(monkeypatch):
    """A module `datasets` that knows one data set and counts how often it is asked."""
    module = types.ModuleType("datasets")
    module.calls = []

    def load_dataset(path, name=None, *, split):
        module.calls.append((path, name, split))
        if path != "org/data":
            raise FileNotFoundError(f"Couldn't find {path}")
        return FakeDataset(TABLE)

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def open_it(text, tmp_path):
    return open_hugging_face(text, tokenizer=BYTES, cache_directory=str(tmp_path / "cache"))


def test_parse(tmp_path, monkeypatch):
    source = parse("hf:org/data:train:text")
    assert (source.dataset, source.config, source.split, source.column) == (
        "org/data",
        None,
        "train",
        "text",
    )
    assert parse("hf:org/data@small:train[:5%]:text".replace("[:5%]", "")).config == "small"
    assert parse("hf:c:/data:train:text").dataset == "c:/data"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a@b").mkdir()
    assert parse("hf:./a@b:train:text").config is None
    for bad in ("hf:org/data", "hf:org/data:train", "hf:org/data:train:", "hf:::"):
        with pytest.raises(UserError, match="is not hf:DATASET:SPLIT:COLUMN"):
            parse(bad)


def test_read_once_into_the_cache(fake, tmp_path):
    file = open_it("hf:org/data@small:train:text", tmp_path)
    assert bytes(file.tokens) == b"first text\0second\0"
    assert fake.calls == [("org/data", "small", "train")]
    assert open_it("hf:org/data@small:train:text", tmp_path).path == file.path
    assert len(fake.calls) == 1
    assert open_it("hf:org/data@large:train:text", tmp_path).path != file.path
    assert fake.calls[1:] == [("org/data", "large", "train")]


def test_the_same_interface(fake, tmp_path):
    source = "hf:org/data:train:text"
    config = TextDataConfig(
        train=(source,), validation=(source,), cache_directory=str(tmp_path / "cache")
    )
    data = open_train(config, batch_size=2, sequence_length=4, seed=0)
    assert data.batch_at(0)["tokens"].shape == (2, 4)
    validation = open_validation(config, batch_size=2, sequence_length=4)
    assert bytes(validation.targets_bytes()) == b"first text\0second\0"


def test_mistakes(fake, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no column 'body'; it has text, number"):
        open_it("hf:org/data:train:body", tmp_path)
    with pytest.raises(UserError, match="row 0 of column 'number' holds int"):
        open_it("hf:org/data:train:number", tmp_path)
    with pytest.raises(UserError, match=r"Cannot load hf:org/no:train:text: FileNotFoundError"):
        open_it("hf:org/no:train:text", tmp_path)
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package 'datasets': pip install"):
        open_it("hf:org/data:train:text", tmp_path)


def test_with_the_package(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `hf` is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf_cache"))
    texts = ["first text", "second"]
    data = datasets.Dataset.from_dict({"text": texts})
    data.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    data.to_json(str(tmp_path / "files" / "train.jsonl"))
    for folder in ("single", "splits", "files"):
        file = open_it(f"hf:{tmp_path}/{folder}:train:text", tmp_path)
        assert bytes(file.tokens) == b"first text\0second\0"
    with pytest.raises(UserError, match=r"no split 'test'; it has \['train'\]"):
        open_it(f"hf:{tmp_path}/splits:test:text", tmp_path)
    # A changed folder is read again.
    datasets.Dataset.from_dict({"text": ["other"]}).to_json(str(tmp_path / "files" / "train.jsonl"))
    assert bytes(open_it(f"hf:{tmp_path}/files:train:text", tmp_path).tokens) == b"other\0"
