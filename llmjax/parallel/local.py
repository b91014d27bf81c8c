"""What one process has of arrays that are laid out over the devices of several."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding

Box = tuple[slice, ...]


def local_box(sharding: Sharding | None, shape: tuple[int, ...]) -> Box:
    """The part of an array that the devices of this process hold together."""
    if sharding is None or sharding.is_fully_addressable:
        return tuple(slice(0, n) for n in shape)
    ends = [
        [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    ]
    axes = zip(*ends, strict=True)
    return tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in axes)


def local_shape(sharding: Sharding | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in local_box(sharding, shape))


def local_values(array: jax.Array) -> np.ndarray:
    """That part, on the host."""
    if array.is_fully_addressable:
        return np.asarray(array)
    box = local_box(array.sharding, array.shape)
    out = np.empty(tuple(s.stop - s.start for s in box), array.dtype)
    for shard in array.addressable_shards:
        index = zip(shard.index, box, array.shape, strict=True)
        starts = [(s.indices(n), b.start) for s, b, n in index]
        out[tuple(slice(at[0] - b, at[1] - b) for at, b in starts)] = shard.data
    return out


def from_local(
    values: np.ndarray, sharding: Sharding | None, shape: tuple[int, ...]
) -> jax.Array | np.ndarray:
    """The array of that part and what the other processes give likewise."""
    if sharding is None or sharding.is_fully_addressable:
        return values
    return jax.make_array_from_process_local_data(sharding, values, shape)
