"""Values that make no model, wherever a configuration comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..checks import shown, type_errors
from .config import DecoderConfig, RopeConfig
from .encoder import EncoderConfig

MOST_LAYERS = 4096
_MOST = 2**31 - 1
_SIZES = ("vocab_size", "hidden_size", "num_heads", "mlp_size", "max_position")
_FACTORS = ("attention_scale", "embed_scale", "residual_scale", "logits_scale")
_SOFTCAPS = ("attention_softcap", "logits_softcap")


def check_layers(count: Any) -> None:
    """A number of layers, before anything is made for each. Raises ValueError."""
    if isinstance(count, int) and not 1 <= count <= MOST_LAYERS:
        raise ValueError(f"num_layers is {shown(count)}, allowed: 1 to {MOST_LAYERS}")


def check_values(config: DecoderConfig | EncoderConfig) -> None:
    """Types, and whether sizes fit each other. Raises ValueError, which says what is allowed."""
    for problem in _problems(config):
        raise ValueError(problem)


def _problems(config: DecoderConfig | EncoderConfig) -> Iterator[str]:
    yield from (message for _, message in type_errors(config))
    yield from _out_of_range(config, _SIZES, 1, _MOST)
    yield from _out_of_range(config, ("num_layers",), 1, MOST_LAYERS)
    yield from _out_of_range(config, ("norm_eps",), 0, 1)
    if isinstance(config, EncoderConfig):
        yield from _out_of_range(config, ("num_types",), 1, _MOST)
        yield from _no_multiple(config, "hidden_size", "num_heads")
        return
    yield from _out_of_range(config, ("num_kv_heads", "head_dim"), 1, _MOST)
    yield from _no_multiple(config, "num_heads", "num_kv_heads")
    yield from _not_above_0(config, _FACTORS)
    yield from _not_above_0(config, _SOFTCAPS)
    for window in set(config.windows):
        if window is not None and window < 1:
            yield f"a sliding window is {window}, allowed: 1 or more"
    for rope in dict.fromkeys(config.ropes):
        yield from (f"rope: {problem}" for problem in _rope_problems(rope, config.head_dim))


def _rope_problems(rope: RopeConfig, head_dim: int) -> Iterator[str]:
    yield from (message for _, message in type_errors(rope))
    if rope.dim % 2 or not 2 <= rope.dim <= head_dim:
        yield f"dim is {rope.dim}, allowed: even, from 2 to head_dim ({head_dim})"
    if rope.kind != "default":
        yield from _out_of_range(rope, ("original_max_position",), 1, _MOST)
    yield from _not_above_0(rope, ("theta", "factor", "attention_factor"))
    yield from _not_above_0(rope, ("low_freq_factor", "high_freq_factor"))
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        yield f"low_freq_factor is {rope.low_freq_factor}, allowed: below high_freq_factor"
    for name in ("short_factor", "long_factor", "freq_factors"):
        if bad := [value for value in getattr(rope, name) if not _is_above_0(value)]:
            yield f"{name} has {bad[0]}, allowed: numbers above 0"


def _out_of_range(config: Any, names: tuple[str, ...], least: int, most: int) -> Iterator[str]:
    for name in names:
        if not least <= (value := getattr(config, name)) <= most:
            yield f"{name} is {shown(value)}, allowed: {least} to {most}"


def _not_above_0(config: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if (value := getattr(config, name)) is not None and not _is_above_0(value):
            yield f"{name} is {shown(value)}, allowed: a number above 0"


def _no_multiple(config: Any, name: str, of: str) -> Iterator[str]:
    value, unit = getattr(config, name), getattr(config, of)
    if value % unit:
        yield f"{name} is {value}, allowed: multiples of {of} ({unit})"


def _is_above_0(value: float) -> bool:
    return math.isfinite(value) and value > 0
