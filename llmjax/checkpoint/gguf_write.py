"""Writes GGUF files, through the `gguf` package, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from .base import TensorInfo

_ARCHITECTURE = "general.architecture"
_KINDS: dict[type, GGUFValueType] = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
_ITEMS = _KINDS | {int: GGUFValueType.INT32}
"""Of lists."""


class Value(NamedTuple):
    """A value of metadata and its type; `item` is that of an array's items."""

    value: Any
    kind: GGUFValueType
    item: GGUFValueType | None = None


def typed(value: Any) -> Value:
    """A plain value with the type that llama.cpp's converters give it."""
    if isinstance(value, list):
        return Value(value, GGUFValueType.ARRAY, _ITEMS[type(value[0])] if value else None)
    return Value(value, _KINDS[type(value)])


class TensorToWrite(NamedTuple):
    """A tensor, whose data is asked for when its turn comes.

    Attributes:
        data: gives values of a float type, or the bytes of quantised rows, uint8.
    """

    info: TensorInfo
    data: Callable[[], np.ndarray]


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, TensorToWrite],
    *,
    done: Callable[[int], object] = lambda weights: None,
) -> None:
    """One file.

    Args:
        metadata: with `general.architecture`; empty arrays are left out, as they have no type.
        done: is told of each tensor's number of weights when it is written.

    Raises:
        OSError: it cannot be written.
    """
    writer = GGUFWriter(None, metadata[_ARCHITECTURE].value)
    for key, (value, kind, item) in metadata.items():
        if key != _ARCHITECTURE and not (kind is GGUFValueType.ARRAY and not value):
            writer.add_key_value(key, value, kind, item)
    for name, (info, _) in tensors.items():
        kind = GGMLQuantizationType[info.type_name]
        block, size = GGML_QUANT_SIZES[kind]
        # Of what is not uint8 the package takes the shape as it is.
        as_is = np.dtype(np.float32)
        writer.add_tensor_info(name, info.shape, as_is, prod(info.shape) // block * size, kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for info, data in tensors.values():
            writer.write_tensor_data(np.ascontiguousarray(data()).view(np.uint8))
            done(prod(info.shape))
    finally:
        writer.close()
