# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Tokenizers: lossless, and clear about what is wrong with a file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import load_tokenizer
from train.errors import UserError


@given(st.text())
def test_bytes_are_lossless(text):
    tokenizer = load_tokenizer("bytes")
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text
    np.testing.assert_array_equal(tokenizer.encode_many([text])[0], tokens)


def test_bytes_decode_what_is_not_utf8():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([65, 0xFF, 66]) == "A\ufffdB"
    assert tokenizer.decode_bytes([65, 0xFF, 66]) == b"A\xffB"
    # A program argument that was not UTF-8 arrives with surrogates and keeps its bytes.
    assert tokenizer.encode(b"A\xff".decode("utf-8", "surrogateescape")) == [65, 0xFF]
    with pytest.raises(UserError, match="lone surrogate U\\+D800"):
        tokenizer.encode("a\ud800")
    with pytest.raises(UserError, match=r"outside 0\.\.255"):
        tokenizer.decode([256])


def test_json_tokenizer(bpe):
    tokenizer = load_tokenizer(bpe)
    text = "the cat sat on the mat. naïve <|endoftext|> 猫"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    assert max(tokens) < tokenizer.vocab_size
    # Text that spells the special token out is text, not an end of the document.
    assert tokenizer.end_of_document not in tokens
    np.testing.assert_array_equal(tokenizer.encode_many([text, "cat"])[0], tokens)


def test_json_tokenizer_ignores_truncation_and_padding(bpe, tmp_path):
    from tokenizers import Tokenizer

    plain = load_tokenizer(bpe)
    changed = Tokenizer.from_file(bpe)
    changed.enable_truncation(2)
    changed.enable_padding(length=50)
    path = str(tmp_path / "changed.json")
    changed.save(path)
    tokenizer = load_tokenizer(path)
    text = "the cat sat on the mat"
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.encode_many([text])[0].tolist() == plain.encode(text)
    assert tokenizer.fingerprint != plain.fingerprint


def test_fingerprint_depends_on_the_content_alone(bpe, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps(json.loads(Path(bpe).read_text()), indent=4))
    assert load_tokenizer(str(copy)).fingerprint == load_tokenizer(bpe).fingerprint


def test_errors(tmp_path, bpe, monkeypatch):
    with pytest.raises(UserError, match=r"no tokenizer file byte.*Did you mean 'bytes'"):
        load_tokenizer("byte")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not valid JSON"):
        load_tokenizer(str(bad))
    bad.write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"bad\.json is not a JSON file of the 'tokenizers' lib"):
        load_tokenizer(str(bad))
    content = json.loads(Path(bpe).read_text())
    content["added_tokens"] = []
    del content["model"]["vocab"]["<|endoftext|>"]
    bad.write_text(json.dumps(content))
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer(str(bad))
    with pytest.raises(UserError, match="Cannot read the tokenizer"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install"):
        load_tokenizer(bpe)
