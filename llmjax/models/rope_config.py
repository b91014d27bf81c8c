"""Reads rotary embedding settings from config.json and from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .config import RopeConfig


def hf_rope(c: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding that a config.json describes, in any of its spellings."""
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UnsupportedModelError(f"rope type {kind!r} is not implemented")
    return RopeConfig(theta=scaling.get("rope_theta") or c.get("rope_theta", 10000.0), dim=head_dim)


def gguf_rope(m: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding that GGUF metadata describes."""
    arch = m["general.architecture"]
    return RopeConfig(
        theta=m.get(f"{arch}.rope.freq_base", 10000.0),
        dim=m.get(f"{arch}.rope.dimension_count", head_dim),
    )
