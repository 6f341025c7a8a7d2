# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The `stdlib` corpus: text that every machine with Python has.

In it: every `.py` file of the standard library as one document, and every topic of the language
reference that `help()` shows (`pydoc_data`) as one document. Left out, so that most machines have
nearly the same text and no table dominates it:

* installed packages, tests (many systems do not ship them) and files written at build time, which
  hold paths of the machine (`_sysconfigdata*`, `config-*`, `sitecustomize`);
* generated tables: the character maps of `encodings` and the like (`is_table`);
* empty files, exact copies of an earlier file, and the few files that are not UTF-8.

Line ends become "\n". A file is in validation or in train by a hash of its path below the library's
folder, never both: about 5 % of the files, up to `VALIDATION_BYTES`.
"""

import ast
import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path

from train.data.token_file import TokenFile, open_cached
from train.data.tokenizer import Tokenizer
from train.errors import UserError

VERSION = 1
"""Changes when the rules of this file change."""
VALIDATION_SHARE = 0.05
VALIDATION_BYTES = 512 * 1024
"""Validation stops growing here, so that a full evaluation stays quick."""
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload")
)
_BUILT = re.compile(r"(_sysconfigdata|config-|sitecustomize|usercustomize)")
_TABLES = re.compile(
    r"encodings/(cp\d+|iso8859_\d+|koi8_\w+|mac_\w+|kz1048|ptcp154|tis_620|hp_roman8|palmos)\.py$"
    r"|html/entities\.py$|msilib/(schema|sequence)\.py$|pydoc_data/topics\.py$|stringprep\.py$"
)


def is_table(path: str) -> bool:
    """Whether a file, named below the library's folder with slashes, is a generated table."""
    return bool(_TABLES.search(path))


def read_documents(folder: str | os.PathLike | None = None) -> dict[str, str]:
    """{path below the library: text} of every document, sorted by path.

    Args:
      folder: the standard library; None means that of the running Python.

    Raises:
      UserError: when the folder holds no Python source, as in some embedded installations.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    texts = {}
    for directory, folders, files in os.walk(root):
        relative = Path(directory).relative_to(root)
        folders[:] = sorted(f for f in folders if f not in _LEFT_OUT and not _BUILT.match(f))
        for name in files:
            path = (relative / name).as_posix()
            if name.endswith(".py") and not _BUILT.match(name) and not is_table(path):
                text = _read(Path(directory) / name)
                if text is not None:
                    texts[path] = text
    texts |= _read_topics(root / "pydoc_data" / "topics.py")
    documents, seen = {}, set()
    for path in sorted(texts):
        if texts[path].strip() and texts[path] not in seen:
            seen.add(texts[path])
            documents[path] = texts[path]
    if not documents:
        raise UserError(
            f"The corpus 'stdlib' needs Python's own source files, but {root} holds none. Use a "
            "usual installation of Python, or give text of your own: jaxmodels data tokens."
        )
    return documents


def split(documents: dict[str, str]) -> dict[str, list[str]]:
    """{"train": paths, "validation": paths}, each sorted."""
    validation: list[str] = []
    size = 0
    for path in sorted(documents, key=_hash):
        if _hash(path) >= VALIDATION_SHARE * 2**64:
            break
        num_bytes = len(documents[path].encode())
        if size + num_bytes <= VALIDATION_BYTES:
            validation.append(path)
            size += num_bytes
    if not validation:  # a tiny library: the file of the smallest hash
        validation = [min(documents, key=_hash)]
    rest = sorted(set(documents) - set(validation))
    if not rest:
        raise UserError("The corpus 'stdlib' found a single file; there is nothing to train on.")
    return {"train": rest, "validation": sorted(validation)}


def open_stdlib(
    part: str,
    *,
    tokenizer: Tokenizer,
    cache_directory: str,
    folder: str | os.PathLike | None = None,
) -> TokenFile:
    """The token file of `part` ("train" or "validation"), built when the cache lacks it.

    The cache is keyed by the text itself, so another Python or tokenizer builds its own files.
    """
    documents = read_documents(folder)
    digest = hashlib.sha256(f"{VERSION} {tokenizer.fingerprint}".encode())
    for path, text in documents.items():
        data = text.encode()
        digest.update(f"\n{path} {len(data)}\n".encode() + data)
    version = "{}.{}".format(*sys.version_info)
    name = f"stdlib-python{version}-{digest.hexdigest()[:16]}"
    return open_cached(
        str(Path(cache_directory) / f"{name}-{part}.tokens"),
        lambda: (documents[path] for path in split(documents)[part]),
        tokenizer=tokenizer,
        what=f"the {part} part of 'stdlib'",
    )


def _read(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None


def _read_topics(file: Path) -> dict[str, str]:
    """The topics of `help()`, from the dictionary literal in its source."""
    source = _read(file) if file.exists() else None
    if source is None:
        return {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return {f"pydoc_data/topics/{name}.txt": text for name, text in topics.items()}
    return {}


def _hash(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
