"""What the kernels in Pallas Mosaic GPU share; only they import this, where that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_gpu import ROWS, TMA_ROWS

TILE = 64
"""Channels of a tile in shared memory: 128 bytes, which are swizzled."""
NOTHING = -1e30
"""Less than any score; finite, so that the difference of two is a number."""


class Arithmetic(NamedTuple):
    """Attributes:
    scale, cap: see `jax_triton.scale_and_cap`; 0 is no cap.
    window: 0 is none.
    """

    scale: float
    cap: float
    window: int


class Keys(NamedTuple):
    """Those of a program.

    Attributes:
        bottom, stop: what its queries see: the first key, and the one behind the last.
        first: of the program, where a block begins.
        count: blocks of the program.
    """

    bottom: Any
    stop: Any
    first: Any
    count: Any

    def seen(self, key):
        return (key >= self.bottom) & (key < self.stop)

    def is_ragged(self, key, block: int):
        """Whether a block of keys, whose first is `key`, has some that no query sees."""
        return (key < self.bottom) | (key + block > self.stop)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma takes it, of 16-bit floats."""
    transforms = (plgpu.TilingTransform((TMA_ROWS, TILE)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def places(
    block_tables, seq, key, keys: Keys, page_size: int, block: int
) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Of a block of keys, whose first is `key`: the rows that TMA moves at once, and where they
    come from (page, rows).

    In the place of pages that no query sees come the first or the last that one does: what a table
    says of others need not be read any more.
    """
    copied = min(page_size, block)
    seen = (lax.div(keys.bottom, page_size), lax.div(keys.stop - 1, page_size))
    for offset in range(0, block, copied):
        row = key + offset
        page = block_tables[seq, jnp.clip(lax.div(row, page_size), *seen)]
        source = pl.multiple_of(lax.rem(row, page_size), copied)
        yield pl.ds(offset, copied), (page, pl.ds(source, copied))


def clear(values, key, keys: Keys) -> None:
    """What no query sees may be NaN, and 0 * NaN is NaN.

    Args:
        values: in shared memory; the first row is that of `key`.
    """
    rows, channels = values.shape
    for channel in range(0, channels, TILE):
        tile = values.at[:, pl.ds(channel, TILE)]
        tile[...] = jnp.where(keys.seen(key + iota((rows, TILE), 0)), tile[...], 0)


def product(pairs, columns: int):
    """The sum of the products of matrices in shared memory, in float32."""

    def multiply(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))


def capped(scores, cap: float):
    """See `jax_triton.scale_and_cap`."""
    if not cap:
        return scores
    shrunk = jnp.exp2(-jnp.abs(scores))
    tanh = (1 - shrunk) / (1 + shrunk)
    return jnp.where(scores < 0, -tanh, tanh) * cap


def iota(shape: tuple[int, int], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def full(shape: tuple[int, ...], value: float):
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def to_columns(rows, shape: tuple[int, ...]):
    """A number a row, as a matrix."""
    return lax.broadcast_in_dim(rows, shape, [0])
