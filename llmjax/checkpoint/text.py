"""The text side of a checkpoint: tokenizer and sampling defaults."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from .generation import defaults_from_gguf, defaults_from_hf
from .json_file import read_json

METADATA = "metadata.gguf"
"""The file that has the text side of a converted GGUF model."""
_GENERATION_CONFIG = "generation_config.json"
_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*"),
    *("*_Pooling/config.json", METADATA),
)


class TextSide(NamedTuple):
    """What LoadedModel says of it."""

    tokenizer: Tokenizer
    generation_defaults: dict[str, float]


def text_from_gguf(metadata: Mapping[str, Any]) -> TextSide:
    """Of GGUF metadata.

    Raises:
        ModelLoadError: the tokenizer is missing, damaged or of an unknown kind.
    """
    return TextSide(tokenizer_from_gguf(metadata), defaults_from_gguf(metadata))


def text_from_folder(folder: Path) -> TextSide:
    """Of a folder as the hub has them; raises alike."""
    generation = folder / _GENERATION_CONFIG
    chosen = read_json(generation) if generation.exists() else {}
    return TextSide(tokenizer_from_folder(folder), defaults_from_hf(chosen))


def copy_text_files(source: Path, folder: Path) -> None:
    """Copies what `text_from_folder` reads, and keeps files that are there."""
    for pattern in _FILES:
        for file in source.glob(pattern):
            target = folder / file.relative_to(source)
            if not file.name.endswith(".index.json") and not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
