"""Whether a model pools its hidden states into one vector, and how: what its files say of it.

Sources: sentence-transformers' modules.json, 1_Pooling/config.json, sentence_bert_config.json and
config_sentence_transformers.json; llama.cpp's key `pooling_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..checks import shown
from ..config import POOLINGS
from ..errors import CheckpointFormatError, ConfigError, UnsupportedModelError
from ..models import DecoderConfig, EncoderConfig
from .base import Checkpoint
from .gguf_file import GGUFCheckpoint
from .json_file import read_json

MODULES = "modules.json"
_MODES = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last"}
"""sentence-transformers' names of those that are implemented."""
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_GGUF_MODES = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True)
class PoolingConfig:
    """From the hidden states of a text's tokens to what is asked of the model.

    Attributes:
        mode: "mean" or "max" over all tokens, or that of the first ("cls") or "last" one.
        task: "embed": the pooled state; "score": what the model's head makes of it.
        normalize: embeddings have length 1.
        max_length: most tokens of a text that the model was made for, where its files say so.
        lowercase: texts are lowercased first.
        prompts: what may be put before a text, by name.
        default_prompt: the name of that which is, where a request names none.
        similarity: of two embeddings.
        dimensions: lengths to which embeddings may be cut (Matryoshka), or "any".
        activation: from the head's number to the score.
    """

    mode: Literal["mean", "cls", "last", "max"]
    task: Literal["embed", "score"] = "embed"
    normalize: bool = True
    max_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: Literal["cosine", "dot"] = "cosine"
    dimensions: tuple[int, ...] | Literal["any"] = ()
    activation: Literal["sigmoid", "identity"] = "sigmoid"


def pooling_of(checkpoint: Checkpoint, asked: str | None = None) -> PoolingConfig | None:
    """How the model pools; None where it generates text.

    Args:
        asked: the mode that the user wants, with which any decoder pools.

    Raises:
        ConfigError: the mode is not one that the model can have.
        UnsupportedModelError: its files ask for what is not implemented.
        CheckpointFormatError: a file is damaged.
    """
    config, _ = checkpoint.read_architecture()
    said = _said(checkpoint, config)
    if isinstance(config, EncoderConfig) and config.scores:
        if asked not in (None, "cls"):
            raise ConfigError(f"pooling is {asked!r}, allowed for {config.architecture}: cls")
        return _scoring(checkpoint)
    if isinstance(config, DecoderConfig) and asked == "cls":
        raise ConfigError(
            f"pooling is 'cls', allowed for {config.architecture}: last or mean, as the first "
            "token of a decoder sees nothing else"
        )
    if asked is None:
        return said
    return replace(said or PoolingConfig(mode="last"), mode=asked)  # type: ignore[arg-type]


def _said(checkpoint: Checkpoint, config: DecoderConfig | EncoderConfig) -> PoolingConfig | None:
    """What the model is made for, without regard to the user."""
    if (checkpoint.path / MODULES).exists():
        return _from_folder(checkpoint.path)
    if isinstance(config, EncoderConfig):
        return PoolingConfig(mode="mean")
    if isinstance(checkpoint, GGUFCheckpoint):
        kind = checkpoint.config.get(f"{config.architecture}.pooling_type", 0)
        if kind and kind not in _GGUF_MODES:
            raise UnsupportedModelError(f"{checkpoint.path}: pooling_type {kind} is unknown")
        return PoolingConfig(mode=_GGUF_MODES[kind]) if kind else None  # type: ignore[arg-type]
    # "Qwen3Model" is a "Qwen3ForCausalLM" that was saved without its head.
    return PoolingConfig(mode="last") if config.architecture.endswith("Model") else None


def _scoring(checkpoint: Checkpoint) -> PoolingConfig:
    """Of a cross-encoder."""
    config = read_json(checkpoint.path / "config.json")
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    activation = str(named).rsplit(".", 1)[-1].lower()
    if activation not in ("sigmoid", "identity"):
        raise UnsupportedModelError(
            f"{checkpoint.path}: activation_fn is {shown(named)}, allowed: Sigmoid or Identity"
        )
    return PoolingConfig(mode="cls", task="score", normalize=False, activation=activation)  # type: ignore[arg-type]


def _from_folder(folder: Path) -> PoolingConfig:
    """Of a sentence-transformers folder."""
    modules = read_json(folder / MODULES, list)
    try:
        kinds = {str(m["type"]).rsplit(".", 1)[-1]: folder / m["path"] for m in modules}
    except (KeyError, TypeError) as error:
        raise CheckpointFormatError(f"{folder / MODULES} lists no modules") from error
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown or "Pooling" not in kinds:
        raise UnsupportedModelError(
            f"{folder / MODULES} has {', '.join(kinds)}, allowed: Transformer, Pooling and "
            "Normalize"
        )
    pooling = read_json(kinds["Pooling"] / "config.json")
    if pooling.get("include_prompt") is False:
        raise UnsupportedModelError(f"{folder}: include_prompt false is not implemented")
    limits = _optional(folder / "sentence_bert_config.json")
    whole = _optional(folder / "config_sentence_transformers.json")
    own = _optional(folder / "config.json")
    prompts = {name: text or "" for name, text in (whole.get("prompts") or {}).items()}
    default = whole.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointFormatError(f"{folder}: default_prompt_name {shown(default)} is no prompt")
    return PoolingConfig(
        mode=_mode(pooling, folder),
        normalize="Normalize" in kinds,
        max_length=limits.get("max_seq_length"),
        lowercase=bool(limits.get("do_lower_case")),
        prompts=prompts,
        default_prompt=default,
        similarity=_similarity(whole.get("similarity_fn_name") or "cosine", folder),
        # vLLM's keys: sentence-transformers has none for it.
        dimensions=tuple(own.get("matryoshka_dimensions") or ())
        or ("any" if own.get("is_matryoshka") else ()),
    )


def _mode(pooling: Mapping[str, Any], folder: Path) -> Any:
    modes = pooling.get("pooling_mode") or [m for k, m in _OLD_MODES.items() if pooling.get(k)]
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{folder}: pooling by {' and '.join(map(str, modes))} is not implemented, allowed: "
            f"one of {', '.join(_MODES)}"
        )
    return _MODES[modes[0]]


def _similarity(name: str, folder: Path) -> Any:
    if name not in ("cosine", "dot"):
        raise UnsupportedModelError(
            f"{folder}: similarity_fn_name is {shown(name)}, allowed: cosine or dot"
        )
    return name


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


assert set(_MODES.values()) == set(POOLINGS)
