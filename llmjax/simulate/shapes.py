"""Sizes of models, as far as memory, bytes read and operations depend on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError, ModelNotFoundError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with a gated feed-forward.

    Attributes:
        windows: of each layer: tokens that a token sees, itself counted; None is all before.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position: int
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)

    @property
    def matrix_params(self) -> int:
        """Of the layers' matrices, each multiplied with every token."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.mlp_size)

    @property
    def head_params(self) -> int:
        """Of the matrix that makes logits."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All but norms and biases."""
        return self.matrix_params + self.head_params * (1 if self.tie_embeddings else 2)


_LLAMA_8B = ModelShape(128256, 4096, 32, 32, 8, 128, 14336, 8192)
_LLAMA_70B = ModelShape(128256, 8192, 80, 64, 8, 128, 28672, 8192)
SHAPES = {
    "llama-3-8b": _LLAMA_8B,
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-8b": replace(_LLAMA_8B, max_position=131072),
    "llama-3.1-70b": replace(_LLAMA_70B, max_position=131072),
    "llama-2-13b": ModelShape(32000, 5120, 40, 40, 40, 128, 13824, 4096),
    "qwen2.5-7b": ModelShape(152064, 3584, 28, 28, 4, 128, 18944, 32768),
    "smollm2-135m": ModelShape(49152, 576, 30, 9, 3, 64, 1536, 8192, tie_embeddings=True),
}
"""By name, from the config.json that each model is published with."""


def find_shape(model: str) -> ModelShape:
    """A known model's shape, or that of a config.json or of a folder that has one.

    Raises:
        ModelNotFoundError: it is neither.
        CheckpointFormatError, UnsupportedModelError: the config.json is not one of a model
            whose work is known.
    """
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(
            f"model is {model!r}, allowed: {', '.join(SHAPES)}, or a config.json or a folder "
            f"with one ({error})"
        ) from error
    except ValueError as error:
        raise CheckpointFormatError(f"{path} is not JSON: {error}") from error
    return read_shape(config)


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config.json describes."""
    config = config.get("text_config") or config
    experts = next((key for key in ("num_local_experts", "num_experts") if config.get(key)), None)
    if experts:
        raise UnsupportedModelError(f"{experts} in config.json: experts are not simulated")

    def required(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise CheckpointFormatError(f"config.json has no number {key!r}")
        return value

    layers, heads = required("num_hidden_layers"), required("num_attention_heads")
    hidden = required("hidden_size")
    return ModelShape(
        vocab_size=required("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        mlp_size=required("intermediate_size"),
        max_position=required("max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, layers),
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window, types = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    if types is None and config.get("model_type") == "mistral":
        types = [SLIDING] * layers
    if types is None or len(types) != layers or set(types) - {FULL, SLIDING}:
        raise UnsupportedModelError(
            f"sliding_window is {window} in config.json, allowed: with layer_types that say, of "
            f"each of {layers} layers, {FULL} or {SLIDING}"
        )
    return tuple(window if kind == SLIDING else None for kind in types)
