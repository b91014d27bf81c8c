"""The host's memory: how much there is, and where weights lie in it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import psutil


def total_bytes() -> int:
    """Memory that this process may have: the machine's, or its container's."""
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """In pages of its own.

    A CPU device takes a buffer so aligned as its own instead of copying it, and between
    weights and what is needed to fill them nothing of the heap is lost.
    """
    nbytes = max(1, prod(shape) * dtype.itemsize)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # Linux has huge pages, unless built without
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, prod(shape)).reshape(shape)
