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


def unpack_some(
    words: Int[np.ndarray, "R words"], bits: int, count: int
) -> UInt8[np.ndarray, "R count"]:
    """The first codes of rows whose last word is not full."""
    missing = -words.shape[1] % bits
    whole = np.pad(words, ((0, 0), (0, missing))) if 32 % bits and missing else words
    return unpack(whole, bits)[:, :count]


def unpack_apart(
    words: Int[np.ndarray, "R words"], bits: int, count: int
) -> UInt8[np.ndarray, "R count"]:
    """The first codes of rows of words that each hold as many whole ones as fit."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = words.astype("<i4", copy=False).view("<u4")[:, :, None] >> shifts
    return (codes & np.uint32(2**bits - 1)).astype(np.uint8).reshape(len(words), -1)[:, :count]


def widened(places: slice, unit: int, count: int) -> tuple[slice, slice]:
    """Places with those beside them, so that they begin and end where a unit does, or the row of
    `count` ends; and where among these they are."""
    first, last = places.start // unit * unit, min(-(-places.stop // unit) * unit, count)
    return slice(first, last), slice(places.start - first, places.stop - first)


def nibbles(
    octets: UInt8[np.ndarray, "*R bytes"], *, high_first: bool = False
) -> UInt8[np.ndarray, "*R codes"]:
    """The two codes of each byte."""
    halves = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return np.stack(halves, axis=-1).reshape(*octets.shape[:-1], -1)


def pack(codes: UInt8[np.ndarray, "R codes"], bits: int) -> Int[np.ndarray, "R words"]:
    """The inverse of `unpack`; what is left of the last word is zero."""
    stream = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    words = np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")
    rest = -words.shape[1] % 4
    words = np.ascontiguousarray(np.pad(words, ((0, 0), (0, rest))))
    return words.view("<i4").astype(np.int32, copy=False)
