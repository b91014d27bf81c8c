"""Puts checkpoint tensors into sharded jax arrays without a second copy in host memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from math import prod

import jax
import numpy as np
from jax.sharding import Sharding

from .base import Checkpoint, Part

_Key = tuple[tuple[int, int], ...]


def array_from_tensor(
    checkpoint: Checkpoint, name: str, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """A whole tensor as an array, converted to `dtype` with round-to-nearest-even."""
    shape = checkpoint.tensors[name].shape

    def fill(parts: list[Part]) -> None:
        checkpoint.read_into(name, parts)

    return _build(shape, dtype, sharding, fill)


def array_from_values(values: np.ndarray, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    """The same of values that are in memory already."""

    def fill(parts: list[Part]) -> None:
        for where, out in parts:
            out[...] = values[where]

    return _build(values.shape, dtype, sharding, fill)


def _build(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    fill: Callable[[list[Part]], None],
) -> jax.Array:
    keys = {_key(i, shape) for i in sharding.addressable_devices_indices_map(shape).values()}
    parts = {key: Part(tuple(slice(*ends) for ends in key), _empty(key, dtype)) for key in keys}
    fill(list(parts.values()))
    array = jax.make_array_from_callback(shape, sharding, lambda i: parts[_key(i, shape)].out)
    # Until a transfer to an accelerator has ended its buffer stays: one at a time.
    return jax.block_until_ready(array)


def _key(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Key:
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))


def _empty(key: _Key, dtype: np.dtype) -> np.ndarray:
    """In pages of its own.

    A CPU device takes a buffer so aligned as its own instead of copying it, and between
    weights and what is needed to fill them nothing of the heap is lost.
    """
    shape = [stop - start for start, stop in key]
    nbytes = max(1, prod(shape) * dtype.itemsize)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # Linux has huge pages, unless built without
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, prod(shape)).reshape(shape)
