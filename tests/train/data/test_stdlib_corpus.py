# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The corpus `stdlib`, on a small library made here and on the running Python's."""

import logging
import os
import pathlib

import pytest

from train.data import (
    ShowCommand,
    StdlibCommand,
    load_tokenizer,
    open_token_file,
    run_show,
    run_stdlib,
    stdlib_corpus,
)
from train.errors import UserError

BYTES = load_tokenizer("bytes")


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "lib"
    files = {f"package/module_{i}.py": f"number = {i}\n" for i in range(60)} | {
        "top.py": "print('top')\r\nprint()\r\n",
        "package/copy.py": "number = 7\n",
        "package/__init__.py": "",
        "package/blank.py": "\n\n",
        "package/test/test_it.py": "test",
        "site-packages/other.py": "other",
        "__pycache__/top.py": "cache",
        "_sysconfigdata_linux.py": "build",
        "config-3.11/python-config.py": "build",
        "encodings/cp437.py": "table",
        "encodings/utf_8.py": "codec = 1\n",
        "notes.txt": "not python",
        "pydoc_data/topics.py": "# made by a tool\ntopics = {'if': 'The if statement.\\n'}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes(b"# \xe9\n")
    return root


def test_what_is_in(library):
    documents = stdlib_corpus.read_documents(library)
    # package/copy.py sorts before module_7.py, of which it is the copy, and stays.
    expected = {f"package/module_{i}.py" for i in range(60) if i != 7} | {
        "package/copy.py",
        "top.py",
        "encodings/utf_8.py",
        "pydoc_data/topics/if.txt",
    }
    assert set(documents) == expected
    assert list(documents) == sorted(documents)
    assert documents["top.py"] == "print('top')\nprint()\n"
    assert documents["pydoc_data/topics/if.txt"] == "The if statement.\n"


def test_split_is_by_file_and_stable(library):
    documents = stdlib_corpus.read_documents(library)
    parts = stdlib_corpus.split(documents)
    assert sorted(parts["train"] + parts["validation"]) == list(documents)
    assert not set(parts["train"]) & set(parts["validation"])
    assert parts["validation"]
    assert stdlib_corpus.split(dict(reversed(documents.items()))) == parts
    # A change of one file's content moves no file.
    assert stdlib_corpus.split(documents | {"top.py": "other"}) == parts


def test_validation_has_a_cap(library, monkeypatch):
    documents = {f"m{i}.py": "x" * 1000 + str(i) for i in range(400)}
    assert 10 < len(stdlib_corpus.split(documents)["validation"]) < 35
    monkeypatch.setattr(stdlib_corpus, "VALIDATION_BYTES", 5100)
    assert len(stdlib_corpus.split(documents)["validation"]) == 5


def test_no_sources(tmp_path):
    with pytest.raises(UserError, match="holds none"):
        stdlib_corpus.read_documents(tmp_path)
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="nothing to train on"):
        stdlib_corpus.split(stdlib_corpus.read_documents(tmp_path))


def test_cache_is_reused_and_follows_the_content(library, tmp_path, caplog, bpe):
    def build(tokenizer=BYTES):
        return stdlib_corpus.open_stdlib(
            "train", tokenizer=tokenizer, cache_directory=str(tmp_path / "cache"), folder=library
        )

    first = build()
    before = pathlib.Path(first.path).read_bytes()
    written = identity(first.path)
    again = build()
    assert (again.path, again.fingerprint) == (first.path, first.fingerprint)
    assert identity(first.path) == written
    assert build(load_tokenizer(bpe)).path != first.path

    with open(first.path, "r+b") as file:  # damaged: built again, and said
        file.truncate(5000)
    with caplog.at_level(logging.WARNING):
        assert build().fingerprint == first.fingerprint
    assert "damaged" in caplog.text
    assert pathlib.Path(first.path).read_bytes() == before

    (library / "top.py").write_text("print('changed')\n")
    changed = build()
    assert changed.path != first.path
    assert changed.fingerprint != first.fingerprint


def identity(path):
    stat = os.stat(path)
    return stat.st_ino, stat.st_mtime_ns


def test_of_the_running_python(tmp_path, capsys):
    documents = stdlib_corpus.read_documents()
    assert "json/decoder.py" in documents
    sizes = {path: len(text.encode()) for path, text in documents.items()}
    assert sum(sizes.values()) > 4_000_000
    assert max(sizes.values()) < 0.05 * sum(sizes.values())
    parts = stdlib_corpus.split(documents)
    assert 100_000 < sum(sizes[p] for p in parts["validation"]) <= stdlib_corpus.VALIDATION_BYTES
    seen = {documents[p] for p in parts["train"]}
    assert not any(documents[p] in seen for p in parts["validation"])

    run_stdlib(StdlibCommand(cache_directory=str(tmp_path), files=True))
    out = capsys.readouterr().out
    assert f"train: {len(parts['train'])} documents" in out
    assert "json/decoder.py" in out
    for part, paths in parts.items():
        (path,) = tmp_path.glob(f"stdlib-*-{part}.tokens")
        assert open_token_file(str(path)).num_documents == len(paths)


def test_show(token_file, capsys):
    path = token_file(["first one", "second", "third, which is long"])
    run_show(ShowCommand(source=path, packing="documents", sequence_length=20, row=1))
    out = capsys.readouterr().out
    assert "row 1 of 2" in out
    assert "segment 1, targets 0..9 of the file\nfirst one" in out
    assert "segment 2, targets 10..16 of the file\nsecond" in out
    with pytest.raises(UserError, match=r"--row 9: .* has the rows 0\.\.1"):
        run_show(ShowCommand(source=path, packing="documents", sequence_length=20, row=9))
