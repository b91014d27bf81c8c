from __future__ import annotations

import pytest

from llmjax.tokenizer.pre_tokenizers import PRE_TOKENIZERS, build, find


def pieces(name: str, text: str) -> list[str]:
    cut = build(find(name)).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pattern_compiles_and_loses_nothing(name):
    text = "Hello wörld's 12345 中文カナ한글 (x)\r\n\n  \t e\u0301 🙂!?..."
    assert "".join(pieces(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's 12345  x", ["It", "'s", " 12345", " ", " x"]),
        ("smollm", "It's 123  x", ["It", "'s", " ", "1", "2", "3", " ", " x"]),
        ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "IT'S 123(x)", ["IT", "'S", " ", "1", "2", "3", "(x", ")"]),
        ("qwen2", "ne\u0301e", ["ne", "\u0301e"]),
        ("qwen35", "ne\u0301e", ["ne\u0301e"]),
        ("ufakzeka", "IT'S", ["IT", "'S"]),
        ("ufakzeka", "Ali'den", ["Ali", "'den"]),
        ("qwen2", "Ali'den", ["Ali", "'d", "en"]),
        ("tekken", "camelCase it's a/\nb", ["camel", "Case", " it", "'s", " a", "/\n", "b"]),
        ("gpt-4o", "camelCase it's 1234", ["camel", "Case", " it's", " ", "123", "4"]),
        ("deepseek-v3", "日本x_y 1234", ["日本", "x", "_y", " ", "123", "4"]),
        ("falcon", "a==b 12345", ["a", "==", "b", " ", "123", "45"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("seed-coder", "a+\nb", ["a", "+", "\n", "b"]),
        ("superbpe", "a 1234567", ["a ", "1", "234", "567"]),
        ("bloom", "a, b.c", ["a", ",", " b", ".", "c"]),
    ],
)
def test_cuts(name, text, expected):
    assert pieces(name, text) == expected
