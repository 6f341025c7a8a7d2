# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The commands under `jaxmodels data`."""

import dataclasses

import tyro

from train.data.token_file import write_tokens
from train.data.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensCommand:
    """Turns text into a memory-mapped token file for training."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Text files (a document each), .jsonl files (a document per line), folders, glob patterns."""
    output: str
    """The token file to write."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizers` JSON file."""
    field: str = "text"
    """Key of the text in each JSON line."""
    overwrite: bool = False
    """Replace an existing output."""


def run_tokens(command: TokensCommand) -> None:
    """Writes the token file and prints what is in it."""
    file = write_tokens(
        command.inputs,
        command.output,
        tokenizer=load_tokenizer(command.tokenizer),
        field=command.field,
        overwrite=command.overwrite,
    )
    print(
        f"{file.path}: {file.num_documents:,} documents, {file.num_tokens:,} tokens "
        f"({file.tokens.dtype}), {file.num_bytes / file.num_tokens:.2f} bytes per token, "
        f"sha256 {file.fingerprint[:12]}"
    )
