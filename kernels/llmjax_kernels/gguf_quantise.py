"""Float matrices as GGUF's quantised blocks: the bytes that llama.cpp writes."""

from __future__ import annotations

import ctypes

import numpy as np
from jaxtyping import Float, UInt8

from .native import library
from .packed import BLOCK_WEIGHTS, GGUF_FORMATS, Rows, _in_threads, _ints, _pointer

BLOCKS: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Weights and bytes of a block, of each type that is made here."""


def quantise_gguf(
    type_name: str, rows: Rows, K: int, importance: Float[np.ndarray, " K"] | None = None
) -> UInt8[np.ndarray, "N bytes"]:
    """Values [N, K] in float32, float16 or bfloat16 as blocks of a GGUF type, row by row.

    Scales are searched for as llama.cpp does (ggml_quantize_chunk), on all cores; the result does
    not depend on how many there are.

    Args:
        type_name: one of `BLOCKS`.
        importance: how much an error counts at each input; without, large weights count for more.
            Q8_0 has no use for it, as in llama.cpp.

    Raises:
        ValueError: rows are no whole blocks, a value is not finite, or a scale is too large for
            the half float that a block keeps it in.
        OSError: the native library is not there.
    """
    size, nbytes = BLOCKS[type_name]
    if K % size:
        raise ValueError(f"its rows of {K} are no whole blocks of {size}")
    N, lib, kind = len(rows), library(), ctypes.c_int64(GGUF_FORMATS[type_name][0])
    out = np.empty((N, K // size * nbytes), np.uint8)
    counts = None
    if importance is not None:
        counts = np.ascontiguousarray(importance, np.float32)
        if counts.shape != (K,):
            raise ValueError(f"it has {K} inputs, and importance is of {counts.size}")
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise ValueError("its importance has values that are negative or not finite")
    weight = None if counts is None else _pointer(counts)
    step = max(1, BLOCK_WEIGHTS // max(K, 1))

    def fill(start: int) -> None:
        block = np.ascontiguousarray(rows[start : start + step], np.float32)
        if not np.isfinite(block).all():
            raise ValueError("it has values that are not finite")
        shape = _ints(len(block), K)
        if not lib.llmjax_quantise_gguf(
            kind, _pointer(block), *shape, weight, _pointer(out[start:])
        ):
            raise ValueError(f"a scale is too large for {type_name}, which keeps it in 16 bits")

    _in_threads(fill, range(0, N, step))
    return out
