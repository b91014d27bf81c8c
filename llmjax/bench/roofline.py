"""The most that this CPU does: bytes read from memory, and 8-bit operations, a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from os import cpu_count

import numpy as np

from llmjax_kernels.host_memory import empty
from llmjax_kernels.native import available, instruction_set, library

from ..errors import ConfigError

BUFFER_BYTES = 1 << 28
"""Read by each thread: many times the largest cache."""
ROUNDS = 2_000_000
"""Of a loop of a few 8-bit instructions."""
REPEATS = 7


@dataclass(frozen=True)
class Roofline:
    """Attributes:
    read: bytes a second, all threads together.
    int8: operations a second likewise; a product and its sum are two.
    instruction_set: whose instructions did them.
    """

    read: float
    int8: float
    threads: int
    instruction_set: str


def measure(*, buffer_bytes: int = BUFFER_BYTES, rounds: int = ROUNDS) -> Roofline:
    """Measures with a thread a core; the best of some tries counts, as it is a limit.

    Raises:
        ConfigError: the native kernels, which do the work, are not there.
    """
    if not available():
        raise ConfigError("the limits are measured by the native CPU kernels, which are not built")
    lib, threads = library(), cpu_count() or 1
    lib.llmjax_read.argtypes, lib.llmjax_read.restype = [c_void_p, c_int64], c_uint64
    lib.llmjax_int8_ops.argtypes, lib.llmjax_int8_ops.restype = [c_int64], c_int64
    buffers = [_random_bytes(buffer_bytes, seed) for seed in range(threads)]

    def read(thread: int) -> int:
        lib.llmjax_read(buffers[thread].ctypes.data, buffer_bytes)
        return buffer_bytes

    return Roofline(
        read=_best_rate(read, threads),
        int8=_best_rate(lambda thread: lib.llmjax_int8_ops(rounds), threads),
        threads=threads,
        instruction_set=instruction_set(),
    )


def _random_bytes(count: int, seed: int) -> np.ndarray:
    # Random, as a hypervisor may keep pages of the same content as one, which a cache holds.
    words = empty((count // 8,), np.dtype(np.uint64))
    words[:] = np.random.default_rng(seed).integers(0, 2**64, len(words), np.uint64)
    return words


def _best_rate(work: Callable[[int], int], threads: int) -> float:
    """What `work` says it did, a second, on all threads at once; ctypes lets go of the GIL."""
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            done = sum(pool.map(work, range(threads)))
            best = max(best, done / (time.perf_counter() - start))
    return best
