# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""Small texts and tokenizers."""

import pytest

from train.data.token_file import write_documents
from train.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The path of a byte-level BPE tokenizer of 300 tokens, made here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat and the dog sat on the cat"] * 5, trainer
    )
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def token_file(tmp_path):
    """token_file(documents, name="a.tokens", tokenizer="bytes") -> path of a token file."""

    def make(documents, name="a.tokens", tokenizer="bytes"):
        path = str(tmp_path / name)
        write_documents(documents, path, tokenizer=load_tokenizer(tokenizer), overwrite=True)
        return path

    return make
