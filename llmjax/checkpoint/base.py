"""What every checkpoint format offers: named tensors, read in whole or by blocks."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..errors import UnsupportedModelError
from ..models import DecoderConfig, EncoderConfig
from ..models.weights import WeightTable
from ..quant import QuantisedMatrix
from .text import TextSide, copy_text_files, text_from_folder

FLOAT_TYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types that are stored as numpy has them; names are those of GGUF and safetensors alike."""

BLOCK_WEIGHTS = 1 << 18
"""Weights converted at a time: a float32 block and its temporaries stay in a core's cache."""


class TensorInfo(NamedTuple):
    """Shape, outermost axis first, and the type's name ("BF16", "Q4_K")."""

    shape: tuple[int, ...]
    type_name: str


class Part(NamedTuple):
    """A piece of a tensor and where to write it; `where` has a slice for each axis."""

    where: tuple[slice, ...]
    out: np.ndarray


class Checkpoint(ABC):
    """An open checkpoint; nothing but headers has been read.

    Attributes:
        path: the file or folder.
        tensors: what it holds, by the checkpoint's names.
        matrices: those of them that are quantised, of a format of `llmjax.quant`.
        kv_code: what it asks keys and values to be kept as ("fp8_e4m3" or "int8"), if it does.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    matrices: Mapping[str, QuantisedMatrix] = MappingProxyType({})
    kv_code: str | None = None

    @property
    @abstractmethod
    def readable_types(self) -> Mapping[str, np.dtype]:
        """Type names that can be read, and the dtype that reading gives."""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries [start:stop] of the outermost axis.

        Float types come as they are, quantised types as float32.
        """

    @abstractmethod
    def read_architecture(self) -> tuple[DecoderConfig | EncoderConfig, WeightTable | None]:
        """The model that this is for, and which tensor fills which of its parameters.

        The table is None where tensors bear the names of the parameters.

        Raises:
            UnsupportedModelError: the architecture, or something its configuration asks for,
                is not implemented.
            CheckpointFormatError: the configuration lacks a key, or has a value that makes no
                model.
        """

    def read_text_side(self) -> TextSide:
        """The tokenizer and sampling defaults; of a folder, from the files that the hub has.

        Raises:
            ModelLoadError: the tokenizer is missing, damaged or of an unknown kind.
        """
        return text_from_folder(self.path)

    def copy_text_side(self, folder: Path) -> None:
        """Puts what `read_text_side` reads into a folder that becomes an orbax checkpoint."""
        copy_text_files(self.path, folder)

    def quantised_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start:stop] of a quantised matrix, uint8 [rows, bytes of a row].

        As GGUF stores them, or of `matrices` as `CodedRows.to_bytes` gives them.
        """
        raise NotImplementedError

    def require_readable(self, names: Iterable[str]) -> None:
        """Raises UnsupportedModelError naming each tensor whose type cannot be read."""
        types = ((name, self.tensors[name].type_name) for name in names)
        bad = [f"{name} ({kind})" for name, kind in types if kind not in self.readable_types]
        if bad:
            raise UnsupportedModelError(
                f"{self.path}: tensor type not supported: {', '.join(bad[:20])}; "
                f"supported: {', '.join(self.readable_types)}"
            )

    def read(self, name: str) -> np.ndarray:
        """A whole tensor, in the dtype that reading its type gives."""
        self.require_readable([name])
        info = self.tensors[name]
        out = np.empty(info.shape, self.readable_types[info.type_name])
        self.read_into(name, [Part(tuple(slice(0, n) for n in info.shape), out)])
        return out

    def read_into(self, name: str, parts: Sequence[Part]) -> None:
        """Writes pieces of a tensor to their arrays, converting to their dtypes.

        Goes over the tensor once by blocks of rows, on a few threads, so that there is no
        second copy of it in memory. Rows and columns that nobody wants are not read, where the
        format allows it.
        """
        shape, step = self.tensors[name].shape, self.block_rows(name)
        begin, end, columns = 0, shape[0], None
        if len(shape) == 2:
            begin, end = _extent(parts, 0)
            left, right = _extent(parts, 1)
            columns = slice(left, right) if right - left < shape[1] else None

        def convert(first: int) -> None:
            last = min(first + step, end)
            block = None
            for where, out in parts:
                start, stop = where[0].start, where[0].stop
                low, high = max(first, start), min(last, stop)
                if low < high:
                    if block is None:
                        block = self._read_block(name, first, last, columns)
                    inner = where[1:]
                    if columns is not None:
                        inner = (slice(where[1].start - left, where[1].stop - left),)
                    piece = block[(slice(low - first, high - first), *inner)]
                    out[low - start : high - start] = piece

        firsts = range(begin, end, step)
        if len(firsts) == 1:
            convert(begin)
        else:
            list(_workers().map(convert, firsts))

    def _read_block(self, name: str, start: int, stop: int, columns: slice | None) -> np.ndarray:
        if columns is None:
            return self.read_rows(name, start, stop)
        return self.read_columns(name, start, stop, columns)

    def read_columns(self, name: str, start: int, stop: int, columns: slice) -> np.ndarray:
        """Some columns of rows [start:stop] of a matrix."""
        return self.read_rows(name, start, stop)[:, columns]

    def block_rows(self, name: str) -> int:
        """Rows to convert at a time."""
        return max(1, BLOCK_WEIGHTS // max(1, prod(self.tensors[name].shape[1:])))


def _extent(parts: Sequence[Part], axis: int) -> tuple[int, int]:
    """The range of an axis that any part wants."""
    ends = [(part.where[axis].start, part.where[axis].stop) for part in parts]
    return min(start for start, _ in ends), max(stop for _, stop in ends)


@functools.cache
def _workers() -> ThreadPoolExecutor:
    # numpy holds the interpreter lock between its calls: more threads gain little.
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "llmjax-load")
