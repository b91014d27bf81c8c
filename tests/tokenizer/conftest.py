from __future__ import annotations

import json
import lzma
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmjax.checkpoint import cache_dir
from llmjax.tokenizer import Tokenizer, tokenizer_from_gguf

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(os.environ.get("LLMJAX_SHARED", ROOT.parent / "shared"))


@cache
def fixture(name: str) -> Any:
    return json.loads(lzma.decompress((FIXTURES / f"{name}.json.xz").read_bytes()))


@cache
def small(vocabulary: str, **changes: Any) -> Tokenizer:
    """A tokenizer on one of the small vocabularies, `tokenizer.ggml.` entries changed."""
    ours = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return tokenizer_from_gguf(small_metadata(vocabulary) | ours)


def small_metadata(vocabulary: str) -> dict[str, Any]:
    metadata = dict(fixture("vocabularies")[vocabulary])
    if vocabulary == "byte-level":
        metadata["tokenizer.ggml.pre"] = "gpt-2"
    return metadata


def shared_file(name: str) -> Path:
    """Public data beside the checkout that the project does not carry itself."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} in LLMJAX_SHARED")
    return path


def model_file(pattern: str) -> Path:
    """A model that another test, or `llmjax pull`, has fetched."""
    path = next(iter(sorted((cache_dir() / "models").glob(f"**/{pattern}"))), None)
    if path is None:
        pytest.skip(f"needs {pattern} in the cache of llmjax pull")
    return path
