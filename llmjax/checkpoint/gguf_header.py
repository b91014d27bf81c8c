"""Parses the header of a GGUF file: metadata and tensor descriptions.

The `gguf` package's own reader makes a numpy array of every string, which takes seconds
for a vocabulary of 262k tokens; the layout is the same for versions 2 and 3.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from ..errors import CheckpointFormatError, UnsupportedModelError
from .base import TensorInfo
from .mapped_file import MappedFile, StoredTensor
from .sniff import describe

_MAX_DIMS = 4
_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class Header:
    """Everything before the tensor data.

    Attributes:
        metadata: keys and values as plain Python values, arrays as lists.
        metadata_range: the bytes that hold them, for copying.
    """

    metadata: dict[str, Any]
    metadata_count: int
    metadata_range: tuple[int, int]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """Reads little-endian values off a mapped file, never beyond its end."""

    def __init__(self, file: MappedFile):
        self.file, self.position = file, 0

    def advance(self, nbytes: int, what: str) -> int:
        start, self.position = self.position, self.position + nbytes
        if self.position > self.file.size:
            raise self.file.truncated(f"{what} reaches to byte {self.position:,}")
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self.advance(struct.calcsize(code), what)
        return struct.unpack_from(code, self.file.map, start)[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        start = self.advance(length, what)
        return self.file.map[start : start + length].decode("utf-8", errors="replace")

    def strings(self, count: int, what: str) -> list[str]:
        data, size, position = self.file.map, self.file.size, self.position
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0] if start <= size else start
            if position > size:
                raise self.file.truncated(f"{what} reaches to byte {position:,}")
            found.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return found

    def array(self, what: str) -> list[Any]:
        item = _value_type(self.file, self.scalar("<I", what), what)
        count = self.scalar("<Q", what)
        if item is GGUFValueType.STRING:
            if count * 8 > self.file.size - self.position:
                raise self.file.truncated(f"{what} has {count:,} strings")
            return self.strings(count, what)
        if item is GGUFValueType.ARRAY:
            raise CheckpointFormatError(f"{self.file.path}: {what} is an array of arrays")
        dtype = np.dtype(_SCALARS[item])
        start = self.advance(count * dtype.itemsize, what)
        return np.frombuffer(self.file.map, dtype, count, start).tolist()

    def value(self, what: str) -> Any:
        kind = _value_type(self.file, self.scalar("<I", what), what)
        if kind is GGUFValueType.STRING:
            return self.string(what)
        if kind is GGUFValueType.ARRAY:
            return self.array(what)
        return self.scalar(_SCALARS[kind], what)


def _value_type(file: MappedFile, code: int, what: str) -> GGUFValueType:
    try:
        return GGUFValueType(code)
    except ValueError:
        raise CheckpointFormatError(
            f"{file.path} is damaged: {what} has the value type {code}, known are 0 to 12"
        ) from None


def parse_header(file: MappedFile) -> Header:
    """Reads metadata and tensor descriptions, and checks that all data lies in the file.

    Raises:
        CheckpointFormatError: not GGUF, big-endian, version 1, damaged or truncated.
        UnsupportedModelError: a tensor's type is not known at all.
    """
    if file.map[:4] != b"GGUF":
        raise file.wrong_format()
    cursor = _Cursor(file)
    cursor.advance(4, "the magic")
    if cursor.scalar("<I", "the header") not in _VERSIONS:
        raise CheckpointFormatError(
            f"{file.path} cannot be read: it is {describe(file.path)}; "
            "little-endian versions 2 and 3 are supported"
        )
    tensor_count = cursor.scalar("<Q", "the header")
    metadata_count = cursor.scalar("<Q", "the header")
    start = cursor.position
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string("the metadata")
        metadata[key] = cursor.value(f"metadata key {key!r}")
    end = cursor.position
    described = [_describe_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointFormatError(f"{file.path}: general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, code, offset in described:
        if name in tensors:
            raise CheckpointFormatError(f"{file.path} is damaged: tensor {name!r} comes twice")
        tensors[name] = _locate(file, name, shape, code, base + offset)
    return Header(metadata, metadata_count, (start, end), tensors)


def _describe_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("the tensor list")
    what = f"the description of tensor {name!r}"
    dims = cursor.scalar("<I", what)
    if dims > _MAX_DIMS:
        raise CheckpointFormatError(
            f"{cursor.file.path} is damaged: tensor {name!r} has {dims} dimensions, at most 4"
        )
    shape = tuple(cursor.scalar("<Q", what) for _ in range(dims))[::-1]
    return name, shape, cursor.scalar("<I", what), cursor.scalar("<Q", what)


def _locate(
    file: MappedFile, name: str, shape: tuple[int, ...], code: int, offset: int
) -> StoredTensor:
    try:
        kind = GGMLQuantizationType(code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UnsupportedModelError(
            f"{file.path}: tensor {name!r} has the GGML type number {code}, which the installed "
            "gguf package does not know (retired, or newer than the package)"
        ) from None
    if shape and shape[-1] % block:
        raise CheckpointFormatError(
            f"{file.path} is damaged: rows of tensor {name!r} have {shape[-1]} weights, "
            f"not a multiple of {kind.name}'s {block}"
        )
    nbytes = prod(shape) // block * block_bytes
    end = offset + nbytes
    if end > file.size:
        raise file.truncated(f"tensor {name!r} ({kind.name} {shape}) ends at byte {end:,}")
    return StoredTensor(TensorInfo(shape, kind.name), file, offset, nbytes)
