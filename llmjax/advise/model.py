"""The shape of whatever llmjax can open, from headers and configuration alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelNotFoundError
from ..simulate.shapes import SHAPES, ModelShape

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..models import DecoderConfig, EncoderConfig


@dataclass(frozen=True)
class Model:
    """What advice depends on.

    Attributes:
        name: the last part of what the user calls it, by which measured figures are found.
        quantised: what its weights are already quantised as ("Q4_1", "awq"); None: they are floats,
            or there are none.
    """

    name: str
    shape: ModelShape
    quantised: str | None = None


def find(model: str) -> Model:
    """Looks a model up, on this machine only.

    Raises:
        ModelNotFoundError: it is not on this machine.
        CheckpointFormatError, UnsupportedModelError: it is none that llmjax runs.
    """
    if model in SHAPES:
        return Model(model, SHAPES[model])
    from ..checkpoint.architecture import require_decoder
    from ..checkpoint.resolve import find_model

    try:
        path = find_model(model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; or name one of {', '.join(SHAPES)}") from error
    config, quantised = _read(path)
    return Model(_name(model), _shape(require_decoder(config)), quantised)


def _name(model: str) -> str:
    """Without folders, an owner, and the file's ending."""
    last = model.rpartition(":")[2].removesuffix("/config.json").rstrip("/")
    return last.rpartition("/")[2].removesuffix(".gguf").lower()


def _read(path: Path) -> tuple[DecoderConfig | EncoderConfig, str | None]:
    from ..checkpoint.architecture import architecture_from_hf
    from ..checkpoint.detect import MARKER, open_checkpoint
    from ..checkpoint.json_file import read_json
    from ..checkpoint.safetensors_folder import CONFIG

    own = path / CONFIG if path.is_dir() else path
    if own.suffix == ".json" and own.exists() and not (path / MARKER).exists():
        settings = read_json(own)
        # A shape is what it is, whatever its weights have become.
        method = (settings.pop("quantization_config", None) or {}).get("quant_method")
        return architecture_from_hf(own, settings)[0], method
    checkpoint = open_checkpoint(path)
    return checkpoint.read_architecture()[0], _quantised(checkpoint)


def _quantised(checkpoint: Checkpoint) -> str | None:
    """What a file calls its quantisation, or else the type of most weights; None for floats."""
    from gguf import LlamaFileType

    from ..checkpoint.base import FLOAT_TYPES
    from ..checkpoint.gguf_file import GGUFCheckpoint

    counts: Counter[str] = Counter()
    for shape, type_name in checkpoint.tensors.values():
        counts[type_name] += prod(shape)
    most = counts.most_common(1)[0][0]
    if most in FLOAT_TYPES:
        return None
    said = (
        checkpoint.config.get("general.file_type")
        if isinstance(checkpoint, GGUFCheckpoint)
        else None
    )
    names = {kind.value: kind.name.removeprefix("MOSTLY_") for kind in LlamaFileType}
    return names.get(said, most)


def _shape(config: DecoderConfig) -> ModelShape:
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp_size=config.mlp_size,
        max_position=config.max_position,
        tie_embeddings=config.tie_embeddings,
        windows=config.windows,
    )
