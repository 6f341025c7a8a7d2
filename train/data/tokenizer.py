# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Tokenizers: bytes, or any `tokenizers` JSON file.

Every document ends with one end-of-document token, which the model learns to predict. For bytes it
is byte 0, so the vocabulary is exactly 256; text does not use that byte, and where it does, the
model sees an end inside the document. A `tokenizers` file must name one of `END_OF_DOCUMENT` among
its tokens.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from train.errors import UserError

END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|end|>",
    "[SEP]",
)
"""Names of the token that ends a document in a `tokenizers` file; the first one found is used."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    name: str
    """As written in the config."""
    vocab_size: int
    """Ids are in [0, vocab_size)."""
    end_of_document: int
    """The id that ends a document."""
    fingerprint: str
    """sha256; equal for tokenizers that give equal tokens."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end-of-document token."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text as an integer array (n,)."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8; byte 0 ends a document."""

    name = "bytes"
    vocab_size = 256
    end_of_document = 0
    fingerprint = hashlib.sha256(b"bytes, end of document 0").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """The exact bytes. Raises UserError for an id that is not a byte."""
        try:
            return bytes(tokens)
        except ValueError:
            raise UserError(
                "Cannot decode: an id is outside 0..255, so these are not byte tokens. Use the "
                "tokenizer that made them."
            ) from None

    def decode(self, tokens: Iterable[int]) -> str:
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, read from its JSON file.

    Special tokens are neither added nor recognised in text: a document that spells one out is
    encoded like any other text. Truncation and padding that the file asks for are turned off.
    """

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"The tokenizer {path} needs the package 'tokenizers': pip install "
                "'jaxmodels[train]', or use the built-in tokenizer 'bytes'."
            ) from None
        text = _read_json(path)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"{path} is not a JSON file of the 'tokenizers' library: {error}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{path}: the tokenizer has an empty vocabulary.")
        self.name = path
        self.vocab_size = max(vocabulary.values()) + 1
        ends = [vocabulary[name] for name in END_OF_DOCUMENT if name in vocabulary]
        if not ends:
            raise UserError(
                f"{path}: the tokenizer has no end-of-document token; looked for "
                f"{' '.join(END_OF_DOCUMENT)}. Add one: tokenizer.add_special_tokens"
                "(['<|endoftext|>']), then save it again."
            )
        self.end_of_document = ends[0]
        canonical = json.dumps(json.loads(text), sort_keys=True)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            _utf8(text)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the path of a `tokenizers` JSON file.

    Raises UserError when the file or the package is missing, or when the file is not a usable
    tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    return JsonTokenizer(name)


def _utf8(text: str) -> bytes:
    """UTF-8 of `text`. Bytes smuggled in by surrogateescape, as in program arguments, pass."""
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(
            f"Cannot encode: character {error.start} of the text is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which is not Unicode text."
        ) from None


def _read_json(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
        json.loads(text)
    except FileNotFoundError:
        near = difflib.get_close_matches(path, ["bytes"], n=1)
        raise UserError(
            f"There is no tokenizer file {path}. "
            + ("Did you mean 'bytes'?" if near else "Give 'bytes' or the path of a JSON file.")
        ) from None
    except OSError as error:
        raise UserError(f"Cannot read the tokenizer {path}: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"The tokenizer {path} is not valid JSON: {error}.") from None
    return text
