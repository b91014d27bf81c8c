"""Puts checkpoint tensors into sharded jax arrays without a second copy in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from llmjax_kernels.host_memory import empty

from .base import Checkpoint, Part

Sources = Sequence[np.ndarray | None]
_Key = tuple[tuple[int, int], ...]


def array_from_tensor(
    checkpoint: Checkpoint, name: str, dtype: np.dtype, sharding: Sharding
) -> jax.Array:
    """A whole tensor as an array, converted to `dtype` with round-to-nearest-even."""
    shape = checkpoint.tensors[name].shape

    def fill(parts: list[Part]) -> None:
        checkpoint.read_into(name, parts)

    return _build(shape, dtype, sharding, fill)


def array_from_values(
    values: np.ndarray, dtype: np.dtype, sharding: Sharding, sources: Sources = ()
) -> jax.Array:
    """The same of values that are in memory already.

    Args:
        sources: for each axis of the array the index in `values` of each place, -1 for zeros;
            None, or no entry, for all in order.
    """
    sources = (*sources, *[None] * (values.ndim - len(sources)))
    sizes = [n if s is None else len(s) for n, s in zip(values.shape, sources, strict=True)]

    def fill(parts: list[Part]) -> None:
        for where, out in parts:
            piece = values
            for axis, (places, source) in enumerate(zip(where, sources, strict=True)):
                if source is None:
                    piece = piece[(slice(None),) * axis + (places,)]
                else:
                    piece = picked(piece, source[places], axis)
            out[...] = piece

    return _build(tuple(sizes), dtype, sharding, fill)


def picked(values: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    """Entries of an axis by their index, zeros where that is -1."""
    before = (slice(None),) * axis
    if len(index) and index[0] >= 0 and (np.diff(index) == 1).all():
        return values[(*before, slice(index[0], index[-1] + 1))]
    if (index < 0).all():
        return np.zeros((*values.shape[:axis], len(index), *values.shape[axis + 1 :]), values.dtype)
    piece = np.take(values, np.maximum(index, 0), axis)
    piece[(*before, index < 0)] = 0
    return piece


def _build(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    fill: Callable[[list[Part]], None],
) -> jax.Array:
    keys = {_key(i, shape) for i in sharding.addressable_devices_indices_map(shape).values()}
    parts = {key: _empty_part(key, dtype) for key in keys}
    fill(list(parts.values()))
    array = jax.make_array_from_callback(shape, sharding, lambda i: parts[_key(i, shape)].out)
    # Until a transfer to an accelerator has ended its buffer stays: one at a time.
    return jax.block_until_ready(array)


def _empty_part(key: _Key, dtype: np.dtype) -> Part:
    out = empty(tuple(stop - start for start, stop in key), dtype)
    return Part(tuple(slice(*ends) for ends in key), out)


def _key(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Key:
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
