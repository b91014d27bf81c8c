"""What the 4-bit codes of packed weights stand for where they are not integers.

The kernels multiply bytes: a number is one of these integers times a unit, which goes into the
scales. format.h has the same integers.
"""

from __future__ import annotations

from typing import NamedTuple


class CodeTable(NamedTuple):
    """The numbers of 16 codes.

    Attributes:
        number: by which the kernels know it.
        integers: from -128 to 127.
        unit: by which they are multiplied.
    """

    number: int
    integers: tuple[int, ...]
    unit: float = 1.0


def _signed(*magnitudes: int) -> tuple[int, ...]:
    """With the sign in the upper bit of a code."""
    return (*magnitudes, *(-m for m in magnitudes))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NF4 = (-123, -86, -65, -49, -35, -23, -11, 0, 10, 20, 30, 42, 54, 69, 89, 123)

CODE_TABLES = {
    "iq4": CodeTable(1, _IQ4),
    "e2m1": CodeTable(2, _signed(0, 1, 2, 3, 4, 6, 8, 12), 1 / 2),
    "nf4": CodeTable(3, _NF4, 1 / 123.26),
    "fp4": CodeTable(4, _signed(0, 1, 80, 120, 40, 60, 20, 30), 1 / 120),
}
"""IQ4_NL and E2M1 exactly. nf4 of bitsandbytes within 0.0029 of its numbers, whose greatest is 1
and whose least distance 0.08; the unit is that of the least such bound. Its fp4 exactly but for
1/192, which is 1/120."""
