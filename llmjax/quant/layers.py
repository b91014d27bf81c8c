"""The tensors and settings of a format, layer by layer, and what must be true of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from ..checks import shown
from ..errors import CheckpointFormatError, UnsupportedModelError
from .base import Tensor, Tensors

FLOATS = ("F16", "BF16", "F32")
"""Types of scales."""


def layers_of(tensors: Tensors, part: str) -> list[str]:
    """The layers that have a tensor of this name."""
    return [name.removesuffix(f".{part}") for name in tensors if name.endswith(f".{part}")]


def settings_of(layer: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of one layer, where the checkpoint's have exceptions.

    GPTQModel's "dynamic" is by expressions that match from the start of a name, the first that
    does; behind "-:" are layers that stay floats. AutoRound's "extra_config" is by names, or by
    expressions for whole names.
    """
    for expression, changes in (settings.get("dynamic") or {}).items():
        if re.match(expression.removeprefix("+:").removeprefix("-:"), layer):
            return settings if expression.startswith("-:") else {**settings, **changes}
    exceptions = settings.get("extra_config") or {}
    for expression, changes in exceptions.items():
        if layer == expression or (layer not in exceptions and re.fullmatch(expression, layer)):
            return {**settings, **changes}
    return settings


def require_tensor(
    tensors: Tensors, layer: str, part: str, shape: tuple[int | None, ...], types: Collection[str]
) -> Tensor:
    """A tensor of a layer.

    Args:
        shape: that it must have; None is any length.
        types: allowed, by the file's names.

    Raises:
        CheckpointFormatError: it is not there, or of another shape or type.
    """
    tensor = tensors.get(f"{layer}.{part}")
    if tensor is None:
        raise CheckpointFormatError(f"layer {layer} has no {part}, which its format needs")
    fits = len(shape) == len(tensor.shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.type_name not in types:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise CheckpointFormatError(
            f"layer {layer}: {part} is {tensor.type_name} {list(tensor.shape)}, "
            f"expected {' or '.join(types)} [{wanted}]"
        )
    return tensor


def group_of(layer: str, settings: Mapping[str, Any], K: int) -> int:
    """The `group_size` of a layer with K inputs, of which -1 is all.

    Raises:
        CheckpointFormatError: it is no such number, or does not divide K.
    """
    group = settings.get("group_size", -1)
    if type(group) is not int or group < -1:
        raise CheckpointFormatError(
            f"layer {layer}: group_size is {shown(group)}, expected -1 or a count of inputs"
        )
    group = K if group == -1 else group
    require_groups(layer, K, group)
    return group


def require_groups(layer: str, K: int, group: int) -> None:
    """Raises CheckpointFormatError where rows are no whole groups."""
    if group < 1 or K % group:
        raise CheckpointFormatError(
            f"layer {layer}: its rows of {K} are no whole groups of {group}"
        )


def order_of(layer: str, groups: Int[np.ndarray, " K"], group: int) -> Int[np.ndarray, " K"] | None:
    """See `QuantisedMatrix.order`, of the group of each input (act-order's g_idx).

    Raises:
        CheckpointFormatError: groups do not have as many inputs each.
    """
    expected = np.arange(len(groups)) // group
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        raise CheckpointFormatError(
            f"layer {layer}: g_idx does not put {group} inputs in each group"
        )
    return order


def require_setting(name: str, value: object, allowed: Collection[object]) -> None:
    """Raises UnsupportedModelError where a setting is something that is not read here."""
    if value not in allowed:
        raise UnsupportedModelError(
            f"quantization: {name} is {shown(value)}, allowed: {', '.join(map(repr, allowed))}"
        )
