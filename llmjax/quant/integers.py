"""Small integers packed in larger ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, UInt8


def unpack(words: Int[np.ndarray, "R words"], bits: int) -> UInt8[np.ndarray, "R codes"]:
    """The codes of rows of int32 words, the lowest bits first; they may straddle words.

    3-bit GPTQ has 32 codes in 3 words; the other widths divide 32.
    """
    little = np.ascontiguousarray(words).astype("<i4", copy=False)
    stream = np.unpackbits(little.view(np.uint8), axis=1, bitorder="little")
    codes = stream.reshape(len(words), -1, bits)
    return np.packbits(codes, axis=2, bitorder="little")[:, :, 0]


def pack(codes: UInt8[np.ndarray, "R codes"], bits: int) -> Int[np.ndarray, "R words"]:
    """The inverse of `unpack`; what is left of the last word is zero."""
    stream = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    words = np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")
    rest = -words.shape[1] % 4
    words = np.ascontiguousarray(np.pad(words, ((0, 0), (0, rest))))
    return words.view("<i4").astype(np.int32, copy=False)
