"""Checkpoints whose tensors lie in files as byte ranges."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import CheckpointFormatError, ModelNotFoundError
from .base import FLOAT_TYPES, Checkpoint, TensorInfo
from .sniff import describe


class DataFile:
    """An open file that is read by ranges.

    Tensors are read, not mapped: mapped pages would count as this process's memory, and
    the kernel maps pages around those that were asked for.

    Args:
        path: the file.
        what: what it should be ("a GGUF file"), for messages.

    Raises:
        ModelNotFoundError: nothing is there.
        CheckpointFormatError: it is a directory or empty.
    """

    def __init__(self, path: Path, what: str):
        if not path.exists():
            raise ModelNotFoundError(f"{path} does not exist, expected {what}")
        self.path, self.what = path, what
        self.size = 0 if path.is_dir() else path.stat().st_size
        if self.size == 0:
            raise self.wrong_format()
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def wrong_format(self) -> CheckpointFormatError:
        """The error for a file that is something else, saying what it looks like."""
        return CheckpointFormatError(
            f"{self.path} is not {self.what}: it looks like {describe(self.path)}"
        )

    def truncated(self, needed: str) -> CheckpointFormatError:
        """The error for a file that ends before `needed` does."""
        return CheckpointFormatError(
            f"{self.path} is truncated: it has {self.size:,} bytes, but {needed}; download it again"
        )

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """A range of bytes as flat uint8."""
        return self._read_to(np.empty(nbytes, np.uint8), offset)

    def read_every(self, offset: int, nbytes: int, stride: int, count: int) -> np.ndarray:
        """`count` ranges of bytes, each `stride` after the one before: uint8 [count, nbytes]."""
        out = np.empty((count, nbytes), np.uint8)
        for i, row in enumerate(out):
            self._read_to(row, offset + i * stride)
        return out

    def _read_to(self, out: np.ndarray, offset: int) -> np.ndarray:
        done, nbytes = 0, len(out)
        while done < nbytes:  # one call reads 2 GB at most
            count = os.preadv(self._descriptor, [out[done:].data], offset + done)
            if count == 0:
                raise CheckpointFormatError(f"{self.path} became shorter while it was read")
            done += count
        return out

    def map(self) -> mmap.mmap:
        """The whole file, for looking around in its header; close it."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    info: TensorInfo
    file: DataFile
    offset: int
    nbytes: int


class FileCheckpoint(Checkpoint):
    """A checkpoint that is nothing but byte ranges of files."""

    _stored: dict[str, StoredTensor]

    def _bytes(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries [start:stop] of the outermost axis, as flat uint8."""
        tensor = self._stored[name]
        rows = tensor.info.shape[0] if tensor.info.shape else 1
        first, last = (tensor.nbytes * row // max(1, rows) for row in (start, stop))
        return tensor.file.read(tensor.offset + first, last - first)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        shape, kind = self.tensors[name]
        flat = self._bytes(name, start, stop).view(FLOAT_TYPES[kind])
        return flat.reshape(stop - start, *shape[1:])

    def read_columns(self, name: str, start: int, stop: int, columns: slice) -> np.ndarray:
        shape, kind = self.tensors[name]
        if kind not in FLOAT_TYPES:
            return super().read_columns(name, start, stop, columns)
        tensor, size = self._stored[name], FLOAT_TYPES[kind].itemsize
        stride = shape[1] * size
        offset = tensor.offset + start * stride + columns.start * size
        width = (columns.stop - columns.start) * size
        flat = tensor.file.read_every(offset, width, stride, stop - start)
        return flat.view(FLOAT_TYPES[kind])

    def read(self, name: str) -> np.ndarray:
        shape, kind = self.tensors[name]
        if kind not in FLOAT_TYPES:
            return super().read(name)
        return self.read_rows(name, 0, shape[0] if shape else 1).reshape(shape)
