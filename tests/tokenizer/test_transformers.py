"""Token ids and texts of real models against transformers'."""

from __future__ import annotations

import pytest

from llmjax.checkpoint.gguf_file import gguf_metadata
from llmjax.tokenizer import Tokenizer, tokenizer_from_gguf

from .conftest import fixture, model_file

EXPECTED = fixture("transformers")
SMOLLM2 = "SmolLM2-135M-Instruct*.gguf"


def check(tokenizer: Tokenizer, expected: dict) -> None:
    assert [tokenizer.encode(text) for text in expected["texts"]] == expected["ids"]
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in expected["ids"]]
    assert decoded == expected["decoded"]
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == expected["visible"]


def test_smollm2():
    check(tokenizer_from_gguf(fixture("smollm2")), EXPECTED[SMOLLM2])


@pytest.mark.parametrize("pattern", EXPECTED)
def test_model_files(pattern):
    metadata = gguf_metadata(model_file(pattern))
    check(tokenizer_from_gguf(metadata), EXPECTED[pattern])
