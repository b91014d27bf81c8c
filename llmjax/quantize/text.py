"""What lies beside the weights of a folder as the hub has them: configuration and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..checkpoint.detect import MARKER
from ..checkpoint.json_file import read_json
from ..checkpoint.safetensors_folder import CONFIG, SEPARATE_SETTINGS
from ..checkpoint.text import METADATA, TextSide, copy_text_files
from ..models import DecoderConfig
from ..tokenizer import write_tokenizer
from .hub_config import hub_config

_GENERATION_CONFIG = "generation_config.json"


def hub_settings(source: Checkpoint, config: DecoderConfig) -> dict[str, Any]:
    """config.json's content: the source's own where it has one.

    Raises:
        UnsupportedModelError: it has none, and none can be made.
    """
    if _has_own(source):
        return read_json(source.path / CONFIG)
    return hub_config(config)


def write_text_side(
    source: Checkpoint,
    config: DecoderConfig,
    folder: Path,
    dtype: np.dtype,
    quantization: dict[str, Any],
) -> None:
    """Writes everything but weights.

    Args:
        dtype: of what stays in floats.
        quantization: `quantization_config`.
    """
    settings = hub_settings(source, config)
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    settings |= {key: dtype.name, "quantization_config": quantization}
    if not _has_own(source):
        text = source.read_text_side()
        settings |= _special_ids(text)
        write_tokenizer(text.tokenizer, folder)
        _write(folder / _GENERATION_CONFIG, _special_ids(text) | text.generation_defaults)
    _write(folder / CONFIG, settings)
    if _has_own(source):
        copy_text_files(source.path, folder)
        for name in (MARKER, METADATA, *SEPARATE_SETTINGS):
            (folder / name).unlink(missing_ok=True)


def _has_own(source: Checkpoint) -> bool:
    return source.path.is_dir() and (source.path / CONFIG).exists()


def _special_ids(text: TextSide) -> dict[str, Any]:
    ends = sorted(text.tokenizer.eos_token_ids)
    ids = {"bos_token_id": text.tokenizer.bos_token_id, "eos_token_id": ends}
    return {name: value for name, value in ids.items() if value not in (None, [])}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
