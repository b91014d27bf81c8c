"""Which decoder a checkpoint is for, and where its parameters come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..checks import type_errors
from ..errors import CheckpointFormatError, LlmjaxError, UnsupportedModelError
from ..models import FAMILIES
from ..models.config import DecoderConfig
from ..models.rope_config import ROPE_TENSORS
from ..models.weights import WeightTable
from .base import Checkpoint
from .orbax_folder import OrbaxCheckpoint
from .safetensors_folder import CONFIG


def read_architecture(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable | None]:
    """The decoder that a checkpoint is for, and which tensor fills which parameter.

    The table is None where tensors bear the names of the parameters.

    Raises:
        UnsupportedModelError: the architecture, or something its configuration asks for,
            is not implemented.
        CheckpointFormatError: the configuration lacks a key.
    """
    if isinstance(checkpoint, OrbaxCheckpoint):
        return checkpoint.decoder_config, None
    try:
        config, table = (
            _read_gguf(checkpoint) if checkpoint.kind == "gguf" else _read_hf(checkpoint)
        )
        for _, message in type_errors(config):
            raise ValueError(message)
        return config, table
    except LlmjaxError:
        raise
    except KeyError as error:
        raise CheckpointFormatError(
            f"{checkpoint.path}: the model's configuration lacks {error}"
        ) from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"{checkpoint.path}: the model's configuration has a value that makes no model: {error}"
        ) from error


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


def _read_hf(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    family = hf_family(checkpoint.config, checkpoint.path / CONFIG)
    config = family.read_config(checkpoint.config)
    return config, family.weights(config)


def _read_gguf(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    asked = checkpoint.config.get("general.architecture")
    family = _family("GGUF_ARCHITECTURES", asked, checkpoint.path)
    factors = {
        name: checkpoint.read(name).tolist() for name in ROPE_TENSORS if name in checkpoint.tensors
    }
    config = family.read_gguf_config(checkpoint.config | factors, checkpoint.tensors)
    return config, family.gguf_weights(config)


def _family(table: str, asked: str | None, path: Path) -> ModuleType:
    for family in FAMILIES:
        if asked in getattr(family, table):
            return family
    raise UnsupportedModelError(
        f"{path}: architecture {asked!r} is not implemented; implemented are {_implemented(table)}"
    )


def _implemented(table: str) -> str:
    return ", ".join(sorted(name for family in FAMILIES for name in getattr(family, table)))
