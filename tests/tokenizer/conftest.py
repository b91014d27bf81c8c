from __future__ import annotations

import json
import lzma
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmjax.tokenizer import Tokenizer, tokenizer_from_gguf

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(os.environ.get("LLMJAX_SHARED", ROOT.parent / "shared"))
MODELS = Path(os.environ.get("LLMJAX_MODELS", ROOT.parent / "models"))


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
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} in LLMJAX_SHARED")
    return path


def model_file(pattern: str) -> Path:
    path = next(iter(sorted(MODELS.glob(f"**/{pattern}"))), None)
    if path is None:
        pytest.skip(f"needs {pattern} in LLMJAX_MODELS")
    return path


_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8"}


@cache
def gguf_metadata(path: Path) -> dict[str, Any]:
    """Key -> value of a GGUF file, without its tensors."""
    data, at = memoryview(path.read_bytes()[: 32 << 20]), 24

    def take(kind: str, count: int = 1) -> np.ndarray:
        nonlocal at
        values = np.frombuffer(data, np.dtype(kind).newbyteorder("<"), count, at)
        at += values.nbytes
        return values

    def value(kind: int) -> Any:
        if kind == 8:
            return bytes(take("u1", int(take("u8")[0]))).decode()
        if kind != 9:
            return take(_SCALARS[kind])[0].item()
        kind, count = int(take("u4")[0]), int(take("u8")[0])
        if kind == 8:
            return [value(8) for _ in range(count)]
        return take(_SCALARS[kind], count).tolist()

    (entries,) = struct.unpack_from("<Q", data, 16)
    return {value(8): value(int(take("u4")[0])) for _ in range(entries)}
