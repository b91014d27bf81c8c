"""Parses the header of a GGUF file: metadata and tensor descriptions.

The `gguf` package's own reader makes a numpy array of every string, which takes seconds
for a vocabulary of 262k tokens; the layout is the same for versions 2 and 3.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from collections.abc import Iterator, Mapping
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
from .data_file import DataFile, StoredTensor
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


class Metadata(Mapping[str, Any]):
    """Keys and values as plain Python values, arrays as lists.

    A value is read when it is asked for, and not kept: a vocabulary's are tens of megabytes.

    Args:
        spans: the bytes that hold each key's value.
    """

    def __init__(self, file: DataFile, spans: dict[str, tuple[int, int]]):
        self._file, self._spans = file, spans

    def __getitem__(self, key: str) -> Any:
        start, end = self._spans[key]
        data = self._file.read(start, end - start).tobytes()
        return _Cursor(self._file, data).value(f"metadata key {key!r}")

    def types(self, key: str) -> tuple[GGUFValueType, GGUFValueType | None]:
        """The type of a key's value, and of an array's items."""
        start, end = self._spans[key]
        cursor, what = _Cursor(self._file, self._file.read(start, end - start).tobytes()), key
        kind = cursor.value_type(what)
        return kind, cursor.array_type(what)[0] if kind is GGUFValueType.ARRAY else None

    def __contains__(self, key: object) -> bool:
        return key in self._spans

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


@dataclass(frozen=True)
class Header:
    """Everything before the tensor data.

    Attributes:
        metadata_range: the bytes that hold the metadata, for copying.
    """

    metadata: Metadata
    metadata_count: int
    metadata_range: tuple[int, int]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """Reads little-endian values off a file's bytes, never beyond their end."""

    def __init__(self, file: DataFile, data: bytes | mmap.mmap):
        self.file, self.data, self.position = file, data, 0

    def advance(self, nbytes: int, what: str) -> int:
        start, self.position = self.position, self.position + nbytes
        if self.position > len(self.data):
            raise self.file.truncated(f"{what} reaches to byte {self.position:,}")
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self.advance(struct.calcsize(code), what)
        return struct.unpack_from(code, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        start = self.advance(length, what)
        return self.data[start : start + length].decode("utf-8", "replace")

    def strings(self, count: int, what: str) -> Iterator[slice]:
        """Where each of the strings that begin here lies."""
        data, size, position = self.data, len(self.data), self.position
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0] if start <= size else start
            if position > size:
                raise self.file.truncated(f"{what} reaches to byte {position:,}")
            yield slice(start, position)
        self.position = position

    def value_type(self, what: str) -> GGUFValueType:
        code = self.scalar("<I", what)
        try:
            return GGUFValueType(code)
        except ValueError:
            raise CheckpointFormatError(
                f"{self.file.path} is damaged: {what} has the value type {code}, known are 0 to 12"
            ) from None

    def array_type(self, what: str) -> tuple[GGUFValueType, int]:
        """The type and number of an array's items."""
        item, count = self.value_type(what), self.scalar("<Q", what)
        if item is GGUFValueType.ARRAY:
            raise CheckpointFormatError(f"{self.file.path}: {what} is an array of arrays")
        return item, count

    def value(self, what: str) -> Any:
        kind = self.value_type(what)
        if kind is GGUFValueType.STRING:
            return self.string(what)
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind], what)
        item, count = self.array_type(what)
        if item is GGUFValueType.STRING:
            spans = self.strings(count, what)
            return [self.data[span].decode("utf-8", "replace") for span in spans]
        return np.frombuffer(self.data, _SCALARS[item], count, self.position).tolist()

    def skip_value(self, what: str) -> None:
        kind, count = self.value_type(what), 1
        if kind is GGUFValueType.ARRAY:
            kind, count = self.array_type(what)
        if kind is GGUFValueType.STRING:
            deque(self.strings(count, what), maxlen=0)
        else:
            self.advance(count * struct.calcsize(_SCALARS[kind]), what)


def parse_header(file: DataFile) -> Header:
    """Reads metadata and tensor descriptions, and checks that all data lies in the file.

    Raises:
        CheckpointFormatError: not GGUF, big-endian, version 1, damaged or truncated.
        UnsupportedModelError: a tensor's type is not known at all.
    """
    with file.map() as data:
        return _parse(_Cursor(file, data))


def _parse(cursor: _Cursor) -> Header:
    file = cursor.file
    if cursor.data[:4] != b"GGUF":
        raise file.wrong_format()
    cursor.advance(4, "the magic")
    if cursor.scalar("<I", "the header") not in _VERSIONS:
        raise CheckpointFormatError(
            f"{file.path} cannot be read: it is {describe(file.path)}; "
            "little-endian versions 2 and 3 are supported"
        )
    tensor_count = cursor.scalar("<Q", "the header")
    metadata_count = cursor.scalar("<Q", "the header")
    start = cursor.position
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(metadata_count):
        key, position = cursor.string("the metadata"), cursor.position
        cursor.skip_value(f"metadata key {key!r}")
        spans[key] = (position, cursor.position)
    metadata, end = Metadata(file, spans), cursor.position
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
    file: DataFile, name: str, shape: tuple[int, ...], code: int, offset: int
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
