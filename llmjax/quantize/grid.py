"""Integer codes: the scale and zero point of a group of weights, and the nearest code."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

_LEAST = 1e-30


class Grid(NamedTuple):
    """Which codes there are. Static: a program is compiled for each.

    Attributes:
        bits: codes are 0 to 2^bits - 1.
        symmetric: the code of zero is 2^(bits - 1); else it is the group's own.
        dtype: that scales are stored in.
    """

    bits: int
    symmetric: bool
    dtype: np.dtype

    @property
    def last(self) -> int:
        """The greatest code."""
        return 2**self.bits - 1

    def fit(
        self, low: Float[Array, "*S"], high: Float[Array, "*S"]
    ) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
        """Scale (as stored) and zero point of weights between `low` and `high`."""
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        if self.symmetric:
            scale = self.stored(2 * jnp.maximum(-low, high) / self.last)
            return scale, jnp.full_like(scale, 2 ** (self.bits - 1))
        scale = self.stored((high - low) / self.last)
        return scale, jnp.clip(jnp.round(-low / scale), 0, self.last)

    def codes(
        self, w: Float[Array, "*S"], scale: Float[Array, "*S"], zero: Float[Array, "*S"]
    ) -> Float[Array, "*S"]:
        """The nearest codes, as floats."""
        return jnp.clip(jnp.round(w / scale) + zero, 0, self.last)

    def nearest(
        self, w: Float[Array, "N G g"], shrink: Float[Array, ...] | float = 1.0
    ) -> Float[Array, "N G g"]:
        """Weights in groups, rounded.

        Args:
            shrink: of the range that codes are to cover, by which it is less than the weights'.
        """
        low, high = jnp.min(w, axis=-1, keepdims=True), jnp.max(w, axis=-1, keepdims=True)
        scale, zero = self.fit(low * shrink, high * shrink)
        return (self.codes(w, scale, zero) - zero) * scale

    def stored(self, scale: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """Rounded as it is stored; of a group of zeros, or of next to nothing, not zero."""
        least = max(float(jnp.finfo(self.dtype).smallest_subnormal), _LEAST)
        return jnp.maximum(scale, least).astype(self.dtype).astype(jnp.float32)


class IntCodes(NamedTuple):
    """A matrix in integer codes: input k has (code - zero) * scale of its group.

    Attributes:
        grid: that the codes are of.
        scales: float32, as rounded to the grid's dtype.
        groups: of each input.
    """

    grid: Grid
    codes: UInt8[np.ndarray, "N K"]
    scales: Float[np.ndarray, "N G"]
    zeros: UInt8[np.ndarray, "N G"]
    groups: Int[np.ndarray, " K"]

    @property
    def values(self) -> Float[np.ndarray, "N K"]:
        """What the codes stand for, as a reader computes it in float32."""
        codes = self.codes.astype(np.float32) - self.zeros[:, self.groups]
        return codes * self.scales[:, self.groups]

    def rows(self, start: int, stop: int) -> IntCodes:
        """Some rows of the matrix."""
        codes, scales, zeros = (a[start:stop] for a in (self.codes, self.scales, self.zeros))
        return IntCodes(self.grid, codes, scales, zeros, self.groups)


def groups_of_neighbours(K: int, group: int) -> Int[np.ndarray, " K"]:
    """The group of each input."""
    return np.arange(K, dtype=np.int32) // np.int32(group)
