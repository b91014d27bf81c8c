"""Which decoder a configuration is for, and which tensor fills which of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..checks import type_errors
from ..errors import CheckpointFormatError, LlmjaxError, UnsupportedModelError
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
        CheckpointFormatError: it lacks a key, or has a value that makes no model.
    """
    family = hf_family(config, path)
    with _faults_named(path):
        return _of_right_types(family.read_config(config)), family.WEIGHTS


def architecture_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[DecoderConfig, WeightTable]:
    """Of GGUF metadata, which has the values of `ROPE_TENSORS` under their names; raises alike."""
    family = _family("GGUF_ARCHITECTURES", metadata.get("general.architecture"), path)
    with _faults_named(path):
        return _of_right_types(family.read_gguf_config(metadata, tensors)), family.GGUF_WEIGHTS


def hf_family(config: Mapping[str, Any], path: Path) -> ModuleType:
    """The family of a config.json, which is at `path`. Raises UnsupportedModelError."""
    asked = config.get("architectures")
    if not isinstance(asked, list) or not asked:
        kind = f", only model_type {config['model_type']!r}" if "model_type" in config else ""
        raise UnsupportedModelError(
            f'{path} names no architecture{kind}; expected "architectures" with one of '
            f"{_implemented('ARCHITECTURES')}"
        )
    return _family("ARCHITECTURES", asked[0], path)


def _family(table: str, asked: str | None, path: Path) -> ModuleType:
    for family in FAMILIES:
        if asked in getattr(family, table):
            return family
    raise UnsupportedModelError(
        f"{path}: architecture {asked!r} is not implemented; implemented are {_implemented(table)}"
    )


def _implemented(table: str) -> str:
    return ", ".join(sorted(name for family in FAMILIES for name in getattr(family, table)))


def _of_right_types(config: DecoderConfig) -> DecoderConfig:
    for _, message in type_errors(config):
        raise ValueError(message)
    return config


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except LlmjaxError:
        raise
    except KeyError as error:
        raise CheckpointFormatError(f"{path}: the model's configuration lacks {error}") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"{path}: the model's configuration has a value that makes no model: {error}"
        ) from error
