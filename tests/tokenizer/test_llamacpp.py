"""Token ids against llama.cpp's."""

from __future__ import annotations

import pytest

from llmjax.checkpoint.gguf_file import gguf_metadata
from llmjax.tokenizer import tokenizer_from_gguf

from .conftest import fixture, model_file, shared_file, small

CASES = fixture("llamacpp")


@pytest.mark.parametrize("case", CASES)
def test_small_vocabularies(case):
    expected = CASES[case]
    changes = {k.removeprefix("tokenizer.ggml."): v for k, v in expected["changes"].items()}
    tokenizer = small(expected["vocabulary"], **changes)
    assert [tokenizer.encode(text) for text in expected["texts"]] == expected["ids"]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "qwen2"])
def test_published_cases(name):
    cases = shared_file(f"data/vocab/ggml-vocab-{name}.gguf.inp")
    file = model_file("qwen2.5-coder-0.5b*.gguf") if name == "qwen2" else cases.with_suffix("")
    with open(cases, encoding="utf-8", newline="") as inputs:
        texts = inputs.read().split("\n__ggml_vocab_test__\n")
    answers = cases.with_suffix(".out").read_text().split("\n")
    tokenizer = tokenizer_from_gguf(gguf_metadata(file))
    for text, ids in zip(texts, answers, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == [*map(int, ids.split())], text
