"""Small integers packed in larger ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, UInt8


def unpack(words: Int[np.ndarray, "R words"], bits: int) -> UInt8[np.ndarray, "R codes"]:
    """The codes of rows of int32 words, the lowest bits first; they may straddle words.

    3-bit GPTQ has 32 codes in 3 words; the other widths divide 32.
    """
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        codes = np.empty((*octets.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            codes[..., i] = octets >> bits * i & (1 << bits) - 1
        return codes.reshape(len(words), -1)
    stream = np.unpackbits(octets, axis=1, bitorder="little")
    codes = stream.reshape(len(words), -1, bits)
    return np.packbits(codes, axis=2, bitorder="little")[:, :, 0]
