"""Checkpoints whose tensors lie in memory-mapped files, whose pages can be given back."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import CheckpointFormatError, ModelNotFoundError
from .base import Checkpoint, TensorInfo
from .sniff import describe


class MappedFile:
    """A whole file, mapped.

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
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

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

    def release(self, offset: int, nbytes: int) -> None:
        """Drops the pages of a range from this process; reading them again is allowed."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(offset + nbytes, self.size) - start
        if length > 0:
            self.map.madvise(mmap.MADV_DONTNEED, start, length)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    info: TensorInfo
    file: MappedFile
    offset: int
    nbytes: int


class MappedCheckpoint(Checkpoint):
    """A checkpoint that is nothing but byte ranges of mapped files."""

    _stored: dict[str, StoredTensor]

    def _span(self, name: str, start: int, stop: int) -> tuple[MappedFile, int, int]:
        tensor = self._stored[name]
        rows = tensor.info.shape[0] if tensor.info.shape else 1
        first, last = (tensor.nbytes * row // max(1, rows) for row in (start, stop))
        return tensor.file, tensor.offset + first, last - first

    def _bytes(self, name: str, start: int, stop: int) -> np.ndarray:
        """Entries [start:stop] of the outermost axis, as flat uint8."""
        file, offset, nbytes = self._span(name, start, stop)
        return np.frombuffer(file.map, np.uint8, nbytes, offset)

    def _view(self, name: str) -> np.ndarray:
        """A whole tensor of a float type, without a copy."""
        shape = self.tensors[name].shape
        return self.read_rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def release_rows(self, name: str, start: int, stop: int) -> None:
        file, offset, nbytes = self._span(name, start, stop)
        file.release(offset, nbytes)
