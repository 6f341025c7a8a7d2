# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Text data: tokenizers, token files, corpora, rows and batches."""

from train.data.commands import (
    ShowCommand,
    StdlibCommand,
    TokensCommand,
    run_show,
    run_stdlib,
    run_tokens,
)
from train.data.text import TrainData, ValidationData, open_train, open_validation
from train.data.token_file import TokenFile, open_token_file, write_tokens
from train.data.tokenizer import load_tokenizer

__all__ = [
    "ShowCommand",
    "StdlibCommand",
    "TokenFile",
    "TokensCommand",
    "TrainData",
    "ValidationData",
    "load_tokenizer",
    "open_token_file",
    "open_train",
    "open_validation",
    "run_show",
    "run_stdlib",
    "run_tokens",
    "write_tokens",
]
