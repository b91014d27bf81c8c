"""Reads rotary embedding settings from config.json and from GGUF metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError
from .config import RopeConfig

logger = logging.getLogger(__name__)

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""GGUF tensors that are settings: `read_gguf_config` finds their values among the metadata."""

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
}


def hf_rope(
    c: Mapping[str, Any], head_dim: int, layer_type: str, theta: float = 10000.0
) -> RopeConfig:
    """The rotary embedding of one type of layer, in any of config.json's spellings.

    `rope_scaling` names its kind "type" or "rope_type" and leaves the base outside;
    `rope_parameters` (transformers 5) holds all, by layer type where types differ.

    Args:
        layer_type: "full_attention" or "sliding_attention".
        theta: the family's base where the config names none.

    Raises:
        UnsupportedModelError: a kind that is not implemented.
        CheckpointFormatError: a setting that the kind needs is missing or misshapen.
    """
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    scaling = scaling.get(layer_type, scaling)
    if scaling is None:
        raise UnsupportedModelError(f"{layer_type} without rotary positions is not implemented")
    kind = _kind(scaling.get("rope_type") or scaling.get("type") or "default")
    missing = [key for key in _REQUIRED[kind] if scaling.get(key) is None]
    if missing:
        raise CheckpointFormatError(f"rope scaling {kind!r} in config.json lacks {missing}")
    keys = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()))
    settings = {key: scaling[key] for key in keys if scaling.get(key) is not None}
    if kind != "default":
        settings |= _lengths(c, scaling, kind)
    partial = scaling.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0
    return _checked(
        theta=scaling.get("rope_theta") or c.get("rope_theta") or theta,
        dim=int(head_dim * partial),
        kind=kind,
        **settings,
    )


def _kind(name: str) -> str:
    kind = "longrope" if name == "su" else name  # Phi-3's first name for it
    if kind not in _REQUIRED:
        allowed = ", ".join(_REQUIRED)
        raise UnsupportedModelError(f"rope type {name!r} is not implemented, allowed: {allowed}")
    return kind


def _lengths(c: Mapping[str, Any], scaling: Mapping[str, Any], kind: str) -> dict[str, Any]:
    extended = c["max_position_embeddings"]
    key = "original_max_position_embeddings"
    original = extended if kind == "dynamic" else c.get(key) or scaling.get(key) or extended
    lengths = {"original_max_position": original}
    if scaling.get("factor") is None:
        lengths["factor"] = extended / original
    return lengths


def _checked(*, dim: int, **settings: Any) -> RopeConfig:
    for key in ("short_factor", "long_factor", "freq_factors"):
        if key in settings:
            settings[key] = tuple(settings[key])
            if len(settings[key]) != dim // 2:
                raise CheckpointFormatError(
                    f"rope {key} has {len(settings[key])} values, expected {dim // 2}"
                )
    return RopeConfig(dim=dim, **settings)


def gguf_rope(m: Mapping[str, Any], tensors: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding that GGUF metadata describes.

    Args:
        m: metadata, and the values of `ROPE_TENSORS` under their names.
    """
    arch = m["general.architecture"]
    scaling = f"{arch}.rope.scaling."
    factor = m.get(f"{scaling}factor") or m.get(f"{arch}.rope.scale_linear") or 1.0
    # llama.cpp takes a factor without a type as linear, and any type of factor 1 as none
    kind = m.get(f"{scaling}type", "linear")
    settings: dict[str, Any] = {}
    if "rope_factors_long.weight" in tensors:
        original = m[f"{scaling}original_context_length"]
        settings = {
            "kind": "longrope",
            "factor": m[f"{arch}.context_length"] / original,
            "original_max_position": original,
            "short_factor": m["rope_factors_short.weight"],
            "long_factor": m["rope_factors_long.weight"],
            "attention_factor": m.get(f"{scaling}attn_factor"),
        }
    elif kind != "none" and factor != 1:
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(f"{scaling}type {kind!r} is not implemented")
        settings = {"kind": kind, "factor": factor}
        settings["original_max_position"] = m.get(
            f"{scaling}original_context_length", m[f"{arch}.context_length"]
        )
        if kind == "yarn":
            settings |= _gguf_yarn(m, scaling)
    if "rope_freqs.weight" in tensors:
        settings["freq_factors"] = m["rope_freqs.weight"]
    return _checked(
        theta=m.get(f"{arch}.rope.freq_base", 10000.0),
        dim=m.get(f"{arch}.rope.dimension_count", head_dim),
        **settings,
    )


def _gguf_yarn(m: Mapping[str, Any], scaling: str) -> dict[str, Any]:
    names = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    return {ours: m[scaling + key] for ours, key in names.items() if scaling + key in m}


def extended_length(rope: RopeConfig, max_position: int) -> int:
    """The context length that scaling gives, where the model's own does not count it yet."""
    if rope.kind not in ("linear", "dynamic", "yarn"):
        return max_position
    extended = int(rope.original_max_position * rope.factor)
    if extended <= max_position:
        return max_position
    logger.info(
        "context length %d: %d extended %g times by %s rope scaling",
        extended,
        rope.original_max_position,
        rope.factor,
        rope.kind,
    )
    return extended
