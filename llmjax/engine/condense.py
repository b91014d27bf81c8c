"""What a sequence keeps of tokens that are evicted, put into its own pages, on the device.

See `cache/eviction.py` for when and why. A program's shapes are always the same, so it is compiled
once, and what it gives depends on nothing but the sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from llmjax_kernels.layout import PagedKV
from llmjax_kernels.page_rows import read_rows, to_pages

from ..cache.eviction import SINKS, Eviction
from ..cache.layout import KVLayout
from ..cache.page_store import Condense
from ..errors import ConfigError
from ..models import Decoder, DecoderConfig
from ..nn.attention import attend_densely
from ..nn.rope import rotate, shift
from .page_mover import AT_ONCE

Pools = tuple[PagedKV, ...]
Rows = dict[int, tuple[Array, Array]]
"""Of each layer without a window, keys and values."""

MOST_STREAMED = 2**20
"""Positions of a sequence that streams: float32 tells the angles of later ones less well apart."""
_NEIGHBOURS = 7
"""Tokens that count with the most wanted among them (SnapKV's pooling): words stay whole."""


def check_eviction(eviction: Eviction, config: DecoderConfig) -> int:
    """The most tokens that a sequence may get to.

    Raises:
        ConfigError: the model cannot do without what is evicted.
    """
    kinds = {rope.kind for rope in config.ropes} & {"dynamic", "longrope"}
    if kinds:
        raise ConfigError(
            f"kv_eviction is {eviction.policy!r}, allowed with the rope scaling {kinds.pop()!r} of "
            "this model: none, as its angles depend on the length of the context"
        )
    if eviction.budget > config.max_position:
        raise ConfigError(
            f"kv_budget is {eviction.budget}, the model allows up to {config.max_position}"
        )
    return config.max_position if eviction.selects else MOST_STREAMED


class Condenser:
    """Carries out `Condense`, by the layout's policy.

    Args:
        weights, pools, history: shapes of what `run` takes.
        native: whether a pool holds all layers of a group.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Decoder],
        tree: Any,
        config: DecoderConfig,
        layout: KVLayout,
        native: bool,
        *,
        weights: Any,
        pools: Any,
        history: Any,
    ):
        assert layout.eviction is not None
        self._graphdef, self._tree, self._config = graphdef, tree, config
        self._layout, self._native, self._eviction = layout, native, layout.eviction
        groups, size = layout.num_groups, layout.block_size
        selects = self._eviction.selects
        read = (self._eviction.budget if selects else self._eviction.kept) // size
        self._shapes = [(3,), (groups, read)]
        ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in self._shapes]
        program = self._selected if selects else self._sinks
        # It only reads the pools: what both reads and changes a pool would copy it.
        jitted = jax.jit(partial(self._pages, program))
        self.program = jitted.lower(pools, weights, history, *ints).compile()

    def run(
        self, pools: Pools, weights: list[Array], history: Array, what: Condense
    ) -> list[tuple[list[int], list[Array]]]:
        """Page ids, and what to write there, as `PageMover.put` takes them."""
        numbers, table = (np.zeros(shape, np.int32) for shape in self._shapes)
        numbers[:] = what.slot, what.position, what.dropped
        for group, ids in enumerate(what.sources):
            # What lies behind a window is not read; any page will do.
            table[group, : len(ids)] = np.maximum(ids, 0)
        parts = self.program(pools, weights, history, numbers, table)
        places = [
            pages[i : i + AT_ONCE] for pages in what.targets for i in range(0, len(pages), AT_ONCE)
        ]
        return list(zip(places, parts, strict=True))

    def _place(self, layer: int) -> tuple[int, int, int]:
        """A layer's group, its pool, and its place in that."""
        group, index = self._layout.places[layer]
        return (group, 0, index) if self._native else (group, index, 0)

    def _is_full(self, layer: int) -> bool:
        return self._layout.windows[self._layout.places[layer][0]] is None

    def _pages(self, program, pools, weights, history, numbers, sources):
        """Whole pages, `AT_ONCE` at a time, of each group without a window."""
        rows = program(pools, weights, history, numbers, sources)
        parts = []
        for group, window in enumerate(self._layout.windows):
            if window is None:
                leaves = self._leaves(group, pools, rows)
                starts = range(0, len(leaves[0]), AT_ONCE)
                parts += [[leaf[i : i + AT_ONCE] for leaf in leaves] for i in starts]
        return parts

    def _leaves(self, group: int, pools: Pools, rows: Rows) -> list[Array]:
        """The pages that one group keeps, for each array of the pools."""
        kept = self._eviction.kept // self._layout.block_size
        count = -(-kept // AT_ONCE) * AT_ONCE
        leaves = []
        for leaf in jax.tree.leaves(pools):
            rest = (leaf.shape[0], *leaf.shape[2:]) if self._native else leaf.shape[1:]
            leaves.append(jnp.zeros((count, *rest), leaf.dtype))
        for layer, (keys, values) in rows.items():
            of, pool, place = self._place(layer)
            if of != group:
                continue
            for i, pages in enumerate(to_pages(pools[pool], keys, values), 2 * pool):
                at = (slice(kept), place) if self._native else slice(kept)
                leaves[i] = leaves[i].at[at].set(pages)
        return leaves

    def _sinks(self, pools, weights, history, numbers, sources):
        """Of each layer the first tokens, their keys `dropped` positions further on."""
        rows = {}
        for layer, rope in enumerate(self._config.ropes):
            if not self._is_full(layer):
                continue
            group, pool, place = self._place(layer)
            format = pools[pool].format
            keys, values = read_rows(pools[pool], place, sources[group])
            by = shift(rope, jnp.full(len(keys), numbers[2]))
            keys = format.encode(rotate(format.decode(keys, jnp.dtype(jnp.float32)), by))
            rows[layer] = keys, values
        return rows

    def _selected(self, pools, weights, history, numbers, sources):
        """Of each layer the tokens that the last ones look at most, in their order."""
        slot, position = numbers[0], numbers[1]
        count = self._eviction.looks_back
        positions = position - count + jnp.arange(count, dtype=jnp.int32)
        context = _LookingBack(self, pools, sources)
        model = nnx.merge(self._graphdef, self._tree.unflatten(weights))
        model.hidden(history[slot, positions], positions, positions + 1, context)
        return context.chosen


class _LookingBack:
    """The last tokens before an eviction, computed once more over the pages that they saw.

    Attributes:
        chosen: of each layer without a window, keys and values that stay.
    """

    def __init__(self, condenser: Condenser, pools: Pools, tables: Int[Array, "G P"]):
        self._condenser, self._pools, self._tables = condenser, pools, tables
        self.chosen: Rows = {}

    def attend(self, layer, q, k, v, spec):
        eviction = self._condenser._eviction
        group, pool, place = self._condenser._place(layer)
        kv = self._pools[pool]
        rows = read_rows(kv, place, self._tables[group])
        keys, values = (kv.format.decode(x, q.dtype).astype(q.dtype) for x in rows)
        # Among what is not evicted, the last tokens are the last of the budget.
        at = jnp.arange(eviction.budget - q.shape[0], eviction.budget)
        out, weights = attend_densely(q, keys, values, spec, at)
        if self._condenser._is_full(layer):
            most = most_attended(jnp.sum(weights, axis=(1, 2)), eviction)
            k, v = (jnp.take_along_axis(x, most.T[:, :, None], axis=0) for x in rows)
            self.chosen[layer] = k, v
        return out


def most_attended(mass: Float[Array, "K keys"], eviction: Eviction) -> Int[Array, "K kept"]:
    """Of each head the tokens that stay, in order: those with most attention paid to them or to
    a neighbour, and the first ones."""
    mass = mass[:, : eviction.budget - eviction.recent]
    mass = lax.reduce_window(mass, -jnp.inf, lax.max, (1, _NEIGHBOURS), (1, 1), "SAME")
    mass = mass.at[:, :SINKS].set(jnp.inf)
    return jnp.sort(lax.top_k(mass, eviction.kept)[1], axis=1)
