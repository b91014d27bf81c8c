"""Which type each tensor of a GGUF file gets, against llama.cpp's own files."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from llmjax.quantize.gguf_mix import ALIASES, MIXES, NEEDS_IMPORTANCE, Shape, choose_types, gguf_mix

_FILE = Path(__file__).parent / "fixtures" / "gguf_mixes.json.xz"
ANSWERS = json.loads(lzma.decompress(_FILE.read_bytes()))
CASES = [(model, asked) for model, answer in ANSWERS.items() for asked in answer["types"]]


@pytest.mark.parametrize(("model", "asked"), CASES)
def test_types_are_those_of_llama_cpp(model, asked):
    answer = ANSWERS[model]
    name, _, importance = asked.partition(" ")
    shape = Shape(answer["arch"], answer["layers"], answer["heads"], answer["kv"])
    tensors = {name: tuple(size) for name, size in answer["shapes"].items()}
    found = choose_types(gguf_mix(name), shape, tensors, has_importance=bool(importance))
    assert found == answer["types"][asked]


def test_every_mix_was_asked_for():
    asked = {case.partition(" ")[0] for _, case in CASES}
    assert asked | {"F32"} == MIXES.keys()


def test_names_of_mixes_are_taken_as_llama_cpp_takes_them():
    assert gguf_mix("q4_k") is gguf_mix("Q4_K_M") is MIXES["Q4_K_M"]
    assert set(ALIASES.values()) | set(NEEDS_IMPORTANCE) <= MIXES.keys()
