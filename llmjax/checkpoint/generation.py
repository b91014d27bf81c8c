"""Sampling defaults that a model declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HF = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def defaults_from_hf(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Sampling fields, by their names in SamplingParams, of generation_config.json."""
    found = {name: generation_config.get(name) for name in _HF}
    return {name: value for name, value in found.items() if value is not None}


def defaults_from_gguf(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Sampling fields, by their names in SamplingParams, of GGUF metadata."""
    return {name: metadata[key] for key, name in _GGUF.items() if key in metadata}
