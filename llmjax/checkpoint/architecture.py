"""Which model a configuration is for, and which tensor fills which of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import CheckpointFormatError, LlmjaxError, UnsupportedModelError
from ..models import FAMILIES, DecoderConfig, EncoderConfig
from ..models.ranges import check_layers, check_values
from ..models.weights import WeightTable
from .base import TensorInfo


def architecture_from_hf(
    path: Path, config: Mapping[str, Any]
) -> tuple[DecoderConfig | EncoderConfig, WeightTable]:
    """Of a config.json.

    Args:
        path: where it is, for messages.

    Raises:
        UnsupportedModelError: the architecture, or something it asks for, is not implemented.
        CheckpointFormatError: it lacks a key, or has a value that makes no model.
    """
    family = hf_family(config, path)
    with _faults_named(path):
        check_layers(config.get("num_hidden_layers"))
        found = family.read_config(config)
        check_values(found)
    return found, family.WEIGHTS


def architecture_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[DecoderConfig, WeightTable]:
    """Of GGUF metadata, which has the values of `ROPE_TENSORS` under their names; raises alike."""
    name = metadata.get("general.architecture")
    family = _family("GGUF_ARCHITECTURES", name, path)
    with _faults_named(path):
        check_layers(metadata.get(f"{name}.block_count"))
        found = family.read_gguf_config(metadata, tensors)
        check_values(found)
    return found, family.GGUF_WEIGHTS


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
    # "Qwen3Model" is a "Qwen3ForCausalLM" that was saved without its head.
    whole = re.sub("Model$", "ForCausalLM", asked) if isinstance(asked, str) else asked
    for family in FAMILIES:
        if asked in getattr(family, table) or whole in getattr(family, table):
            return family
    raise UnsupportedModelError(
        f"{path}: architecture {asked!r} is not implemented; implemented are {_implemented(table)}"
    )


def require_decoder(config: DecoderConfig | EncoderConfig) -> DecoderConfig:
    """Raises UnsupportedModelError where the model does not generate text."""
    if isinstance(config, EncoderConfig):
        gives = "scores pairs of texts" if config.scores else "gives embeddings of texts"
        raise UnsupportedModelError(
            f"{config.architecture} is an encoder, which {gives} and does not generate"
        )
    return config


def fitted(table: WeightTable, tensors: Mapping[str, TensorInfo]) -> WeightTable:
    """A table for what was saved of the inner model alone, without the first part of its names."""
    prefix, _, rest = table["embed.weight"].name.partition(".")
    if table["embed.weight"].name in tensors or rest not in tensors:
        return table
    return {
        path: replace(source, name=source.name.removeprefix(f"{prefix}."))
        for path, source in table.items()
    }


def _implemented(table: str) -> str:
    return ", ".join(sorted(name for family in FAMILIES for name in getattr(family, table)))


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
