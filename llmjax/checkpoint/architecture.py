"""Which decoder a checkpoint is for, and where its parameters come from."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError
from ..models import FAMILIES
from ..models.config import DecoderConfig
from ..models.weights import Source, WeightTable
from .base import FLOAT_TYPES, Checkpoint
from .orbax_folder import OrbaxCheckpoint


def read_architecture(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    """The decoder that a checkpoint is for, and which tensor fills which parameter.

    Raises:
        UnsupportedModelError: the architecture, or something its configuration asks for,
            is not implemented.
        CheckpointFormatError: the configuration lacks a key.
    """
    if isinstance(checkpoint, OrbaxCheckpoint):
        return checkpoint.decoder_config, {name: Source(name) for name in checkpoint.tensors}
    try:
        if checkpoint.kind == "gguf":
            return _read_gguf(checkpoint)
        return _read_hf(checkpoint)
    except KeyError as error:
        raise CheckpointFormatError(
            f"{checkpoint.path}: the model's configuration lacks {error}"
        ) from error


def _read_hf(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    scheme = checkpoint.config.get("quantization_config")
    if scheme:
        raise UnsupportedModelError(
            f"{checkpoint.path} is quantised by {scheme.get('quant_method')!r}; safetensors "
            f"weights are read as {', '.join(FLOAT_TYPES)}, quantised ones from GGUF files only"
        )
    asked = checkpoint.config.get("architectures") or [None]
    family = _family("ARCHITECTURES", asked[0], checkpoint)
    config = family.read_config(checkpoint.config)
    return config, family.weights(config)


def _read_gguf(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    asked = checkpoint.config.get("general.architecture")
    family = _family("GGUF_ARCHITECTURES", asked, checkpoint)
    config = family.read_gguf_config(checkpoint.config, checkpoint.tensors)
    return _with_rope_factors(checkpoint, config), family.gguf_weights(config)


def _family(table: str, asked: str | None, checkpoint: Checkpoint) -> ModuleType:
    for family in FAMILIES:
        if asked in getattr(family, table):
            return family
    known = sorted(name for family in FAMILIES for name in getattr(family, table))
    raise UnsupportedModelError(
        f"{checkpoint.path}: architecture {asked!r} is not implemented; "
        f"implemented are {', '.join(known)}"
    )


def _with_rope_factors(checkpoint: Checkpoint, config: DecoderConfig) -> DecoderConfig:
    """Takes into the configuration the frequency factors that GGUF stores as tensors."""

    def factors(name: str) -> tuple[float, ...]:
        return tuple(checkpoint.read(name).astype(float).tolist())

    changes: dict[str, Any] = {}
    if "rope_freqs.weight" in checkpoint.tensors:
        changes["freq_factors"] = factors("rope_freqs.weight")
    if "rope_factors_long.weight" in checkpoint.tensors:
        changes["kind"] = "longrope"
        changes["long_factor"] = factors("rope_factors_long.weight")
        changes["short_factor"] = factors("rope_factors_short.weight")
    if not changes:
        return config
    return replace(config, ropes=tuple(replace(rope, **changes) for rope in config.ropes))
