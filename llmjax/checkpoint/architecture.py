"""Which decoder a configuration is for, and which tensor fills which of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError
from ..models import FAMILIES
from ..models.config import DecoderConfig
from ..models.weights import WeightTable
from .base import TensorInfo


def architecture_from_hf(
    path: Path, config: Mapping[str, Any]
) -> tuple[DecoderConfig, WeightTable]:
    """Of a config.json.

    Args:
        path: where it is, for messages.

    Raises:
        UnsupportedModelError: the architecture, or something it asks for, is not implemented.
        CheckpointFormatError: it lacks a key.
    """
    family = _family("ARCHITECTURES", (config.get("architectures") or [None])[0], path)
    with _missing_keys_named(path):
        return family.read_config(config), family.WEIGHTS


def architecture_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[DecoderConfig, WeightTable]:
    """Of GGUF metadata, which has the values of `ROPE_TENSORS` under their names; raises alike."""
    family = _family("GGUF_ARCHITECTURES", metadata.get("general.architecture"), path)
    with _missing_keys_named(path):
        return family.read_gguf_config(metadata, tensors), family.GGUF_WEIGHTS


def _family(table: str, asked: str | None, path: Path) -> ModuleType:
    for family in FAMILIES:
        if asked in getattr(family, table):
            return family
    known = sorted(name for family in FAMILIES for name in getattr(family, table))
    raise UnsupportedModelError(
        f"{path}: architecture {asked!r} is not implemented; implemented are {', '.join(known)}"
    )


@contextmanager
def _missing_keys_named(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise CheckpointFormatError(f"{path}: the model's configuration lacks {error}") from error
