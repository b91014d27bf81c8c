"""How a model's heads and mlp channels are dealt out to devices that they do not divide among.

Each device gets as many key-value heads, each with all of its query heads. Where there are fewer
key-value heads than devices they are copied, and their query heads dealt out to the copies;
what then still does not divide is filled up with zeros, which change no sum. Queries are filled up
with those of the head before: what reads them has zeros there, and nothing is greater for them
where all that a token has is rounded by its greatest value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Sizes(NamedTuple):
    """What tensor parallelism divides."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int


class Partition(NamedTuple):
    """A model's sizes as they are divided, and where what is there comes from.

    Attributes:
        sizes: each a multiple of the number of devices, `head_dim` aside.
        sources: by logical axis (see rules.py): of each place the index in the checkpoint, -1
            for a zero. Axes that stay as they are have no entry.
        kv_copies: places side by side that have the same key-value head, each with a part of its
            query heads.
    """

    sizes: Sizes
    sources: dict[str, Int[np.ndarray, " places"]]
    kv_copies: int


def partition(sizes: Sizes, devices: int, mlp_unit: int = 1) -> Partition:
    """Deals a model out to `devices`.

    Args:
        mlp_unit: channels of the mlp that must stay together.
    """
    heads, kv_heads, head_dim, mlp = sizes
    group = heads // kv_heads
    copies = max(1, devices // kv_heads)
    group_part = -(-group // copies)
    places = -(-kv_heads * copies // devices) * devices
    kv_source = np.full(places, -1)
    kv_source[: kv_heads * copies] = np.repeat(np.arange(kv_heads), copies)
    source = np.full((places, group_part), -1)
    for head in range(kv_heads):
        queries = np.full(copies * group_part, -1)
        queries[:group] = head * group + np.arange(group)
        source[head * copies : (head + 1) * copies] = queries.reshape(copies, group_part)
    mlp_places = -(-mlp // (devices * mlp_unit)) * devices * mlp_unit
    mlp_source = np.concatenate([np.arange(mlp), np.full(mlp_places - mlp, -1)])
    heads_source = source.reshape(-1)
    found = {
        "heads": _channels(heads_source, head_dim),
        "queries": _channels(_filled(heads_source), head_dim),
        "kv_heads": _channels(kv_source, head_dim),
        "mlp": mlp_source,
    }
    divided = Sizes(places * group_part, places, head_dim, mlp_places)
    changed = {name: s for name, s in found.items() if not np.array_equal(s, np.arange(len(s)))}
    return Partition(divided, changed, copies)


def _filled(heads: Int[np.ndarray, " heads"]) -> Int[np.ndarray, " heads"]:
    """Without gaps: in each the head before it."""
    return heads[np.maximum.accumulate(np.where(heads < 0, 0, np.arange(len(heads))))]


def _channels(heads: Int[np.ndarray, " heads"], head_dim: int) -> Int[np.ndarray, " channels"]:
    """The same of every channel of a head."""
    channels = heads[:, None] * head_dim + np.arange(head_dim)
    return np.where(heads[:, None] < 0, -1, channels).reshape(-1)
