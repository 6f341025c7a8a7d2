# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Token files: what goes in comes out; damage and bad input are named."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import TokensCommand, load_tokenizer, open_token_file, run_tokens, write_tokens
from train.data import token_file as token_file_module
from train.data.token_file import HEADER_BYTES, token_dtype, write_documents
from train.errors import UserError

BYTES = load_tokenizer("bytes")


def texts_of(file, tokenizer=BYTES):
    starts = [0, *file.ends[:-1].tolist()]
    documents = [file.tokens[a:b].tolist() for a, b in zip(starts, file.ends.tolist())]
    assert all(d[-1] == tokenizer.end_of_document for d in documents)
    return [tokenizer.decode(d[:-1]) for d in documents]


@given(st.lists(st.text(), max_size=6))
def test_documents_come_back(tmp_path_factory, documents):
    path = str(tmp_path_factory.mktemp("t") / "a.tokens")
    full = [d for d in documents if d]
    if not full:
        with pytest.raises(UserError, match="no text in these"):
            write_documents(documents, path, tokenizer=BYTES, what="these")
        return
    file = write_documents(documents, path, tokenizer=BYTES)
    assert texts_of(file) == full
    assert file.num_tokens == file.num_bytes == sum(len(d.encode()) + 1 for d in full)
    assert file.tokens.dtype == np.uint8


def test_json_tokenizer(tmp_path, bpe):
    tokenizer = load_tokenizer(bpe)
    documents = ["the cat sat", "naïve 猫 dog"]
    path = str(tmp_path / "a.tokens")
    file = write_documents(documents, path, tokenizer=tokenizer)
    assert texts_of(file, tokenizer) == documents
    assert file.tokens.dtype == np.uint16
    assert file.num_bytes == sum(len(d.encode()) + 1 for d in documents)
    with pytest.raises(UserError, match=r"made with the tokenizer .*tokenizer\.json.* is bytes"):
        open_token_file(path, BYTES)


def test_dtype_is_the_smallest_that_fits():
    sizes = {256: "u1", 257: "u2", 65536: "u2", 65537: "u4"}
    assert {v: token_dtype(v).str[1:] for v in sizes} == sizes


def test_batches_do_not_change_the_file(tmp_path, monkeypatch):
    documents = [f"document {i} " * i for i in range(20)]
    one = write_documents(documents, str(tmp_path / "one"), tokenizer=BYTES)
    monkeypatch.setattr(token_file_module, "BATCH_CHARACTERS", 50)
    many = write_documents(documents, str(tmp_path / "many"), tokenizer=BYTES)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    assert one.fingerprint == many.fingerprint


def test_inputs(tmp_path):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "b.md").write_text("second")
    (tmp_path / "docs" / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\n")
    (tmp_path / "docs" / "deep" / "c.py").write_text("third")
    (tmp_path / "docs" / "empty.py").write_text("")
    (tmp_path / "docs" / ".hidden.txt").write_text("hidden")
    (tmp_path / "docs" / "picture.png").write_bytes(b"\x89PNG\xff")
    lines = [{"text": "line 1", "n": 1}, {"text": ""}, {"text": "line 2\nof two"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "odd.ending").write_text("named")
    inputs = [
        f"{tmp_path}/docs",
        f"{tmp_path}/*.jsonl",
        f"{tmp_path}/odd.ending",
        f"{tmp_path}/docs/**/*.py",  # known already
    ]
    file = write_tokens(inputs, str(tmp_path / "out.tokens"), tokenizer=BYTES)
    assert texts_of(file) == ["first\r\n", "second", "third", "line 1", "line 2\nof two", "named"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"text": "a"}\n{"text": \n', "x.jsonl, line 2: not valid JSON"),
        (b'{"text": "a"}\n\n[1]\n', r"x.jsonl, line 3: expected a JSON object, got list"),
        (b'{"texts": "a"}\n', "line 1: no field 'text'; this line has texts. Use --field texts"),
        (b'{"text": 3}\n', "line 1: the field 'text' holds int, not text"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: byte 10 \(0xff\) is not UTF-8"),
        (b'{"text": "\\ud800"}\n', "line 1: the text holds a lone surrogate"),
        (b"\n \n", "x.jsonl is empty"),
    ],
)
def test_bad_json_lines_are_named_with_their_line(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        write_tokens([f"{tmp_path}/x.jsonl"], str(tmp_path / "out"), tokenizer=BYTES)
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]  # nothing is left behind


def test_bad_inputs_are_named(tmp_path):
    output = str(tmp_path / "out.tokens")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "bad.txt").write_bytes(b"abc\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()

    def fails(message, inputs, output=output):
        with pytest.raises(UserError, match=message):
            write_tokens(inputs, output, tokenizer=BYTES)

    fails("Name at least one", [])
    fails(r"no file or folder .*test\.txt\. Did you mean .*text\.txt", [f"{tmp_path}/test.txt"])
    fails(
        r"bad\.txt: byte 3 \(0xe9\) is not UTF-8", [f"{tmp_path}/text.txt", f"{tmp_path}/bad.txt"]
    )
    fails(r"empty\.txt is empty", [f"{tmp_path}/empty.txt"])
    fails("There is no text in .*empt", [f"{tmp_path}/empt*"])
    fails("folder holds no text", [f"{tmp_path}/folder"])
    fails("No file matches", [f"{tmp_path}/*.rst"])
    fails("is a folder. Name a file", [f"{tmp_path}/text.txt"], str(tmp_path / "folder"))
    assert not (tmp_path / "out.tokens").exists()


def test_never_overwrites_unless_told(tmp_path):
    text, output = tmp_path / "a.txt", tmp_path / "out.tokens"
    text.write_text("new")
    output.write_text("precious")
    with pytest.raises(UserError, match=r"exists.*--overwrite"):
        write_tokens([str(text)], str(output), tokenizer=BYTES)
    assert output.read_text() == "precious"
    with pytest.raises(UserError, match="also an input"):
        write_tokens([str(text)], str(text), tokenizer=BYTES, overwrite=True)
    assert text.read_text() == "new"
    text.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):  # a failure keeps the old file
        write_tokens([str(text)], str(output), tokenizer=BYTES, overwrite=True)
    assert output.read_text() == "precious"
    text.write_text("new")
    assert texts_of(write_tokens([str(text)], str(output), tokenizer=BYTES, overwrite=True)) == [
        "new"
    ]


def test_damage_is_noticed(tmp_path):
    path = tmp_path / "a.tokens"
    write_documents(["some text", "more"], str(path), tokenizer=BYTES)
    good = path.read_bytes()

    def fails(message, content):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_token_file(str(path), BYTES)

    fails("is not a token file", b"")
    fails("is not a token file. Make one from text: jaxmodels data tokens", b"just text")
    fails("damaged .*header", good[:100])
    fails("damaged .*header", good.replace(b'"num_bytes": 15', b'"num_bytes": 16'))
    fails(r"damaged \(it has [\d,]+ bytes instead of", good[:-1])
    fails(r"damaged \(it has [\d,]+ bytes instead of", good + b"\0")
    flipped = bytearray(good)
    flipped[HEADER_BYTES + 3] ^= 1
    fails("damaged .*sha256", bytes(flipped))
    with pytest.raises(UserError, match=r"no token file .*b\.tokens\. Did you mean .*a\.tokens"):
        open_token_file(str(tmp_path / "b.tokens"))


def test_fingerprint_follows_the_content(token_file):
    prints = [
        open_token_file(token_file(documents)).fingerprint
        for documents in (["ab", "c"], ["ab", "c"], ["a", "bc"], ["ab", "d"])
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_command(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n')
    output = str(tmp_path / "a.tokens")
    run_tokens(TokensCommand(inputs=(f"{tmp_path}/a.jsonl",), output=output, field="body"))
    assert "1 documents, 6 tokens (uint8), 1.00 bytes per token" in capsys.readouterr().out
    assert texts_of(open_token_file(output)) == ["hello"]
