"""Which decoder a checkpoint is for, and where its parameters come from."""

from __future__ import annotations

from types import ModuleType

from ..errors import CheckpointFormatError, UnsupportedModelError
from ..models import FAMILIES
from ..models.config import DecoderConfig
from ..models.rope_config import ROPE_TENSORS
from ..models.weights import WeightTable
from .base import Checkpoint
from .orbax_folder import OrbaxCheckpoint


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
        if checkpoint.kind == "gguf":
            return _read_gguf(checkpoint)
        return _read_hf(checkpoint)
    except KeyError as error:
        raise CheckpointFormatError(
            f"{checkpoint.path}: the model's configuration lacks {error}"
        ) from error


def _read_hf(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    asked = checkpoint.config.get("architectures") or [None]
    family = _family("ARCHITECTURES", asked[0], checkpoint)
    config = family.read_config(checkpoint.config)
    return config, family.weights(config)


def _read_gguf(checkpoint: Checkpoint) -> tuple[DecoderConfig, WeightTable]:
    asked = checkpoint.config.get("general.architecture")
    family = _family("GGUF_ARCHITECTURES", asked, checkpoint)
    settings = {
        key: checkpoint.config[key] for key in checkpoint.config if not key.startswith("tokenizer.")
    }
    factors = {
        name: checkpoint.read(name).tolist() for name in ROPE_TENSORS if name in checkpoint.tensors
    }
    config = family.read_gguf_config(settings | factors, checkpoint.tensors)
    return config, family.gguf_weights(config)


def _family(table: str, asked: str | None, checkpoint: Checkpoint) -> ModuleType:
    for family in FAMILIES:
        if asked in getattr(family, table):
            return family
    known = sorted(name for family in FAMILIES for name in getattr(family, table))
    raise UnsupportedModelError(
        f"{checkpoint.path}: architecture {asked!r} is not implemented; "
        f"implemented are {', '.join(known)}"
    )
