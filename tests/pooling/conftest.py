"""Tiny models that embed or score, loaded once (see oracles/make_pooling.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from llmjax import LLM

HERE = Path(__file__).parent
TEXTS, QUERY, LONG = json.loads((HERE / "fixtures/texts.json").read_text("utf-8")).values()
"""LONG has more tokens than any of the models takes."""


@pytest.fixture(scope="session")
def pooled() -> Iterator[Callable[[str], tuple[LLM, dict[str, np.ndarray]]]]:
    """By its name a model, and what sentence-transformers says of it."""
    loaded = []

    @cache
    def load(name: str) -> tuple[LLM, dict[str, np.ndarray]]:
        folder = HERE / "fixtures" / name
        llm = LLM(str(folder), token_buckets=(32, 200), background=False)
        loaded.append(llm)
        return llm, dict(np.load(folder / "ref.npz"))

    yield load
    for llm in loaded:
        llm.close()
