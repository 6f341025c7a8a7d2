# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Token files: documents as one flat, memory-mapped array of token ids.

    bytes 0..4095   b"JAXMODELS TOKENS 1\n", a JSON object, spaces
    then            every document's ids followed by one end-of-document id (uint8, uint16 or
                    uint32, little endian: the smallest that holds the vocabulary)
    then            for every document the index just past its end, as int64

The JSON holds the counts, the tokenizer's fingerprint, the sha256 of everything after byte 4096,
and the sha256 of itself, so that a damaged file is noticed when it is opened.
"""

import array
import dataclasses
import difflib
import glob
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from train.data.tokenizer import Tokenizer
from train.errors import UserError

MAGIC = b"JAXMODELS TOKENS 1\n"
HEADER_BYTES = 4096
VERIFY_BYTES = 2**30
"""Files up to this size are hashed when opened (about a second); larger ones are checked for their
size and header only, and a token out of range is still noticed when its row is read."""
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".json",
    ".yaml", ".yml", ".toml", ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp",
    ".cu", ".java", ".js", ".ts", ".jsx", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua",
    ".r", ".jl", ".sh", ".sql", ".scala", ".kt", ".swift", ".hs", ".ml", ".css", ".srt",
))
# fmt: on
"""What a folder given as input is searched for, besides JSON lines."""
LINES_SUFFIXES = frozenset((".jsonl", ".ndjson"))
"""JSON lines: one document per line."""
BATCH_CHARACTERS = 2**22
"""Text tokenized at one time."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """An open token file."""

    path: str
    tokens: np.ndarray
    """(N,) uint8, uint16 or uint32, memory-mapped: documents, each with its end token."""
    ends: np.ndarray
    """(num_documents,) int64: document i is tokens[ends[i - 1] : ends[i]]."""
    num_bytes: int
    """Bytes of UTF-8 text, counting the end of a document as one, as a file of bytes would."""
    vocab_size: int
    end_of_document: int
    tokenizer_fingerprint: str
    fingerprint: str
    """sha256 of the tokens and the document ends."""

    @property
    def num_tokens(self) -> int:
        """End-of-document tokens included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.ends)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds ids below `vocab_size`."""
    for dtype in ("<u1", "<u2", "<u4"):
        if vocab_size <= 2 ** (8 * np.dtype(dtype).itemsize):
            return np.dtype(dtype)
    raise UserError(f"vocab_size={vocab_size} does not fit 32 bits.")


def write_tokens(
    inputs: Sequence[str],
    output: str,
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    overwrite: bool = False,
) -> TokenFile:
    """Tokenizes text files and JSON lines into one token file.

    Args:
      inputs: text files (one document each), `.jsonl` files (one document per line), folders
        (searched for `TEXT_SUFFIXES` and JSON lines, in sorted order) and glob patterns.
      output: the file to write; it appears only when complete.
      tokenizer: see `load_tokenizer`.
      field: the key of the text in each JSON line.
      overwrite: replace an existing `output`.

    Raises:
      UserError: for an input that is missing, empty, not UTF-8 or not JSON lines, naming the file
        (and line), and for an existing `output`; nothing is written then.
    """
    _check_output(output, overwrite)
    files = find_inputs(inputs)
    if any(Path(output).resolve() == file.resolve() for file, _ in files):
        raise UserError(f"The output {output} is also an input. Choose another name.")
    return write_documents(
        _read_documents(files, field),
        output,
        tokenizer=tokenizer,
        overwrite=overwrite,
        what=", ".join(inputs),
    )


def write_documents(
    documents: Iterable[str],
    output: str,
    *,
    tokenizer: Tokenizer,
    overwrite: bool = False,
    what: str = "the input",
) -> TokenFile:
    """Tokenizes documents into a token file, streaming; empty documents are left out.

    `what` names the input in the error for no text at all.
    """
    _check_output(output, overwrite)
    path = Path(output)
    # A name of its own, since several processes may build the same file of a shared cache.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                _write(file, documents, tokenizer, what)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write {output}: {error.strerror or error}.") from None
    return open_token_file(output, tokenizer)


def _write(file, documents: Iterable[str], tokenizer: Tokenizer, what: str) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype)
    digest = hashlib.sha256()
    ends = array.array("q")
    num_tokens = num_bytes = largest = 0

    def put(data: bytes) -> None:
        file.write(data)
        digest.update(data)

    file.write(b" " * HEADER_BYTES)
    for texts in _batches(documents):
        for text, ids in zip(texts, tokenizer.encode_many(texts), strict=True):
            largest = max(largest, int(ids.max(initial=0)))
            put(ids.astype(dtype, casting="unsafe").tobytes() + end.tobytes())
            num_tokens += len(ids) + 1
            num_bytes += len(text.encode("utf-8", errors="surrogateescape")) + 1
            ends.append(num_tokens)
    if not ends:
        raise UserError(f"There is no text in {what}.")
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"The tokenizer {tokenizer.name} gave the id {largest}, but its vocabulary ends at "
            f"{tokenizer.vocab_size - 1}; its file is inconsistent."
        )
    put(np.asarray(ends, "<i8").tobytes())
    header = {
        "dtype": dtype.str,
        "num_tokens": num_tokens,
        "num_documents": len(ends),
        "num_bytes": num_bytes,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "sha256": digest.hexdigest(),
    }
    header["header_sha256"] = _header_digest(header)
    data = MAGIC + json.dumps(header, indent=1).encode() + b"\n"
    if len(data) > HEADER_BYTES:
        raise UserError(f"The tokenizer's path is too long for the header: {tokenizer.name}")
    file.seek(0)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def open_token_file(path: str, tokenizer: Tokenizer | None = None) -> TokenFile:
    """Memory-maps a token file after checking it.

    Raises:
      UserError: when the file is missing, is no token file, is truncated or damaged, or was made by
        another tokenizer than `tokenizer`.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise UserError(f"There is no token file {path}.{_near_file(path)}") from None
    except OSError as error:
        raise UserError(f"Cannot read the token file {path}: {error.strerror}.") from None
    if not head.startswith(MAGIC):
        raise UserError(
            f"{path} is not a token file. Make one from text: jaxmodels data tokens {path} "
            f"--output {Path(path).with_suffix('.tokens').name}"
        )
    damaged = f"The token file {path} is damaged ({{}}). Make it again."
    try:
        header = json.loads(head[len(MAGIC) :])
        header_ok = header.pop("header_sha256") == _header_digest(header)
    except (ValueError, KeyError, AttributeError):
        header_ok = False
    if not header_ok:
        raise UserError(damaged.format("its header is incomplete or was changed"))
    dtype = np.dtype(header["dtype"])
    num_tokens, num_documents = header["num_tokens"], header["num_documents"]
    expected = HEADER_BYTES + num_tokens * dtype.itemsize + 8 * num_documents
    if size != expected:
        raise UserError(damaged.format(f"it has {size:,} bytes instead of {expected:,}"))
    if size <= VERIFY_BYTES and _payload_digest(path) != header["sha256"]:
        raise UserError(damaged.format("its contents do not match their sha256"))
    if tokenizer is not None and header["tokenizer_fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"The token file {path} was made with the tokenizer {header['tokenizer']} "
            f"({header['vocab_size']:,} tokens), but data.tokenizer is {tokenizer.name} "
            f"({tokenizer.vocab_size:,} tokens), or its file has changed since. Use the same "
            "tokenizer, or make the token file again."
        )
    tokens = np.memmap(path, dtype, "r", HEADER_BYTES, (num_tokens,))
    ends_at = HEADER_BYTES + num_tokens * dtype.itemsize
    return TokenFile(
        path=str(path),
        tokens=tokens,
        ends=np.memmap(path, "<i8", "r", ends_at, (num_documents,)),
        num_bytes=header["num_bytes"],
        vocab_size=header["vocab_size"],
        end_of_document=header["end_of_document"],
        tokenizer_fingerprint=header["tokenizer_fingerprint"],
        fingerprint=header["sha256"],
    )


def open_cached(
    path: str, build: Callable[[], Iterable[str]], *, tokenizer: Tokenizer, what: str
) -> TokenFile:
    """A token file of a cache; written from the documents of `build()` when it is not there, and
    again, with a warning in the log, when it is damaged. `what` names the text."""
    if os.path.exists(path):
        try:
            return open_token_file(path, tokenizer)
        except UserError as error:
            logging.getLogger(__name__).warning("Tokenizing %s again. %s", what, error)
    return write_documents(build(), path, tokenizer=tokenizer, overwrite=True, what=what)


def find_inputs(inputs: Sequence[str]) -> list[tuple[Path, bool]]:
    """The files that `inputs` name, each once, in order, with whether it was named itself.

    Folders are searched recursively in sorted order, hidden files and `__pycache__` left out.
    Raises UserError for a name that leads to no file.
    """
    if not inputs:
        raise UserError("Name at least one text file, JSON-lines file, folder or glob pattern.")
    found: dict[Path, bool] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if _is_text(p.relative_to(path), p))
            if not files:
                raise UserError(
                    f"The folder {name} holds no text: looked for {' '.join(sorted(TEXT_SUFFIXES))}"
                    f" {' '.join(sorted(LINES_SUFFIXES))}. Name files of other endings themselves, "
                    "or with a glob pattern."
                )
        elif path.exists():
            found.setdefault(path, True)
            continue
        elif glob.has_magic(name):
            files = sorted(Path(p) for p in glob.glob(name, recursive=True) if os.path.isfile(p))
            if not files:
                raise UserError(f"No file matches the pattern {name}.")
        else:
            raise UserError(f"There is no file or folder {name}.{_near_file(name)}")
        for file in files:
            found.setdefault(file, False)
    return list(found.items())


def _is_text(relative: Path, path: Path) -> bool:
    return (
        path.suffix.lower() in TEXT_SUFFIXES | LINES_SUFFIXES
        and not any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        and path.is_file()
    )


def _read_documents(files: Iterable[tuple[Path, bool]], field: str) -> Iterator[str]:
    for path, named in files:
        try:
            if path.suffix.lower() in LINES_SUFFIXES:
                yield from _read_lines(path, field)
                continue
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}.") from None
        if not data and named:
            raise UserError(f"The file {path} is empty.")
        yield _decode(data, str(path))


def _read_lines(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        any_line = False
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            text = _decode(line, where)
            if not text.strip():
                continue
            any_line = True
            try:
                record = json.loads(text)
            except ValueError as error:
                raise UserError(f"{where}: not valid JSON: {error}.") from None
            if not isinstance(record, dict):
                raise UserError(
                    f"{where}: expected a JSON object, got {type(record).__name__}. Each line "
                    f'should look like {{"{field}": "..."}}.'
                )
            if field not in record:
                near = difflib.get_close_matches(field, list(record), n=1)
                raise UserError(
                    f"{where}: no field {field!r}; this line has {', '.join(record) or 'none'}. "
                    f"Use --field {near[0] if near else 'NAME'}."
                )
            if not isinstance(record[field], str):
                raise UserError(
                    f"{where}: the field {field!r} holds {type(record[field]).__name__}, not text."
                )
            try:
                record[field].encode()
            except UnicodeEncodeError:
                raise UserError(f"{where}: the text holds a lone surrogate (\\ud800..).") from None
            yield record[field]
        if not any_line:
            raise UserError(f"The file {path} is empty.")


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} (0x{data[error.start]:02x}) is not UTF-8. Convert the "
            "file to UTF-8, or leave it out."
        ) from None


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in documents:
        if text:
            batch.append(text)
            characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_output(output: str, overwrite: bool) -> None:
    if os.path.isdir(output):
        raise UserError(f"The output {output} is a folder. Name a file.")
    if os.path.exists(output) and not overwrite:
        raise UserError(f"{output} exists. Choose another name, or add --overwrite to replace it.")


def _header_digest(header: dict) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _payload_digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _near_file(path: str) -> str:
    folder = Path(path).parent
    names = os.listdir(folder) if folder.is_dir() else []
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    return f" Did you mean {folder / near[0]}?" if near else ""
