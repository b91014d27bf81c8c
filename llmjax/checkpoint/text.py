"""The text side of a checkpoint: tokenizer and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from .base import Checkpoint
from .generation import defaults_from_gguf, defaults_from_hf
from .gguf_file import gguf_metadata
from .json_file import read_json
from .orbax_folder import METADATA

GENERATION_CONFIG = "generation_config.json"


class TextSide(NamedTuple):
    """What LoadedModel says of it."""

    tokenizer: Tokenizer
    generation_defaults: dict[str, float]


def read_text_side(checkpoint: Checkpoint) -> TextSide:
    """Reads it from GGUF metadata or from the files of a folder.

    Raises:
        ModelLoadError: the tokenizer is missing, damaged or of an unknown kind.
    """
    if checkpoint.kind == "gguf":
        return _from_gguf(checkpoint.config)
    if (checkpoint.path / METADATA).exists():
        return _from_gguf(gguf_metadata(checkpoint.path / METADATA))
    return _from_folder(checkpoint.path)


def _from_gguf(metadata: Mapping[str, Any]) -> TextSide:
    return TextSide(tokenizer_from_gguf(metadata), defaults_from_gguf(metadata))


def _from_folder(folder: Path) -> TextSide:
    generation = folder / GENERATION_CONFIG
    chosen = read_json(generation) if generation.exists() else {}
    return TextSide(tokenizer_from_folder(folder), defaults_from_hf(chosen))
