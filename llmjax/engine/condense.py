"""What a sequence keeps of tokens that are evicted, put into its own pages, on the device.

See `cache/eviction.py` for when and why. A program's shapes are always the same, so it is compiled
once, and what it gives depends on nothing but the sequence.

Where devices share the heads each keeps rows of its own. What a head keeps is chosen by all of its
queries, so devices that have copies of one head add up what theirs look at. Stages each keep rows
of their own layers; where the last tokens are computed once more they go through all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llmjax_kernels.layout import PagedKV
from llmjax_kernels.page_rows import read_rows, to_pages

from ..cache.eviction import SINKS, Eviction
from ..cache.page_store import Condense
from ..errors import ConfigError
from ..models import Decoder, DecoderConfig
from ..nn.attention import attend_densely
from ..nn.rope import rotate, shift
from ..parallel.rules import HEADS, KV_PAGES
from .page_mover import AT_ONCE
from .step import StepPrograms, shapes_of

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
        parts: of the model, in order; one where it is not in stages.
        cuts: where the pools of each part are among all.
        num_pages: of each pool.
    """

    def __init__(self, parts: Sequence[StepPrograms], cuts: Sequence[slice], num_pages: int):
        first, last = parts[0], parts[-1]
        eviction = first.layout.eviction
        assert eviction is not None
        groups, size = first.layout.num_groups, first.layout.block_size
        read = (eviction.budget if eviction.selects else eviction.kept) // size
        self._shapes = [(3,), (groups, read)]
        self._cuts = cuts
        self._tokens: Any = None
        x: jax.ShapeDtypeStruct | None = None
        if eviction.selects:
            numbers, _ = _ints(self._shapes, last)
            looked_back = partial(_last_tokens, count=eviction.looks_back)
            jitted = jax.jit(looked_back, out_shardings=_whole(last))
            lowered = jitted.lower(last.state_shapes(num_pages).history, numbers)
            self._tokens, x = lowered.compile(), lowered.out_info
        self.stages: list[StageCondenser] = []
        for part in parts:
            self.stages.append(StageCondenser(part, num_pages, self._shapes, x))
            x = self.stages[-1].gives

    def run(
        self, pools: Pools, history: Array, what: Condense
    ) -> list[tuple[list[int], list[Array]]]:
        """Page ids, and what to write there in all pools, as a mover's `put` takes them."""
        numbers, table = (np.zeros(shape, np.int32) for shape in self._shapes)
        numbers[:] = what.slot, what.position, what.dropped
        for group, ids in enumerate(what.sources):
            # What lies behind a window is not read; any page will do.
            table[group, : len(ids)] = np.maximum(ids, 0)
        x = None if self._tokens is None else self._tokens(history, numbers)
        found = []
        for stage, cut in zip(self.stages, self._cuts, strict=True):
            parts, x = stage.run(pools[cut], x, numbers, table)
            found.append(parts)
        places = [
            pages[i : i + AT_ONCE] for pages in what.targets for i in range(0, len(pages), AT_ONCE)
        ]
        rows = (list(chain.from_iterable(parts)) for parts in zip(*found, strict=True))
        return list(zip(places, rows, strict=True))


class StageCondenser:
    """Condenses what one stage of a model keeps.

    Args:
        part: the stage's programs.
        num_pages: of each pool.
        shapes: of the numbers and the page ids that the program takes.
        x: what comes into the stage, tokens or hidden states; None where it is not asked for.

    Attributes:
        program: `(pools, weights, x, numbers, sources) -> (pages, x)`.
        gives: what comes out of the stage.
    """

    def __init__(
        self,
        part: StepPrograms,
        num_pages: int,
        shapes: Sequence[tuple[int, ...]],
        x: jax.ShapeDtypeStruct | None,
    ):
        model, self.layout = part.model, part.layout
        assert self.layout.eviction is not None
        self.eviction = self.layout.eviction
        self.mesh = model.mesh
        self.kv_copies, self.kv_queries = model.kv_copies, model.kv_queries
        self._model, self._tree = model, part.tree
        self._is_last = model.layers is None or model.layers.stop == model.config.num_layers
        # What is sought in keys that are rotated and copied needs no weights.
        self._weights = part.weights if self.eviction.selects else []
        self._given = None
        if x is not None:
            self._given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_whole(part))
        program = self._selected if self.eviction.selects else self._sinks
        # It only reads the pools: what both reads and changes a pool would copy it.
        jitted = jax.jit(
            partial(self._pages, program),
            out_shardings=(model.place.sharding(KV_PAGES), _whole(part)),
        )
        pools = part.state_shapes(num_pages).pages
        ints = _ints(shapes, part)
        lowered = jitted.lower(pools, shapes_of(self._weights), self._given, *ints)
        self.program = lowered.compile()
        self.gives: jax.ShapeDtypeStruct | None = lowered.out_info[1]

    def run(
        self, pools: Pools, x: Array | None, numbers: np.ndarray, sources: np.ndarray
    ) -> tuple[list[list[Array]], Array | None]:
        """Pages of all groups without a window, `AT_ONCE` at a time, and what the next stage is
        given."""
        if self._given is not None:
            x = jax.device_put(x, self._given.sharding)
        return self.program(pools, self._weights, x, numbers, sources)

    def place(self, layer: int) -> tuple[int, int, int]:
        """A layer's group, its pool, and its place in that."""
        group, index = self.layout.places[layer]
        return (group, 0, index) if self._model.native else (group, index, 0)

    def is_full(self, layer: int) -> bool:
        return self.layout.windows[self.layout.places[layer][0]] is None

    def _pages(self, program, pools, weights, x, numbers, sources):
        """Whole pages, `AT_ONCE` at a time, of each group without a window."""
        rows, x = program(pools, weights, x, numbers, sources)
        parts = []
        for group, window in enumerate(self.layout.windows):
            if window is None:
                leaves = self._leaves(group, pools, rows)
                starts = range(0, len(leaves[0]), AT_ONCE)
                parts += [[leaf[i : i + AT_ONCE] for leaf in leaves] for i in starts]
        return parts, x

    def _leaves(self, group: int, pools: Pools, rows: Rows) -> list[Array]:
        """The pages that one group keeps, for each array of the pools."""
        native = self._model.native
        kept = self.eviction.kept // self.layout.block_size
        count = -(-kept // AT_ONCE) * AT_ONCE
        leaves = []
        for leaf in jax.tree.leaves(pools):
            rest = (leaf.shape[0], *leaf.shape[2:]) if native else leaf.shape[1:]
            leaves.append(jnp.zeros((count, *rest), leaf.dtype))
        for layer, (keys, values) in rows.items():
            of, pool, place = self.place(layer)
            if of != group:
                continue
            for i, pages in enumerate(to_pages(pools[pool], keys, values), 2 * pool):
                at = (slice(kept), place) if native else slice(kept)
                leaves[i] = leaves[i].at[at].set(pages)
        return leaves

    def _sinks(self, pools, weights, x, numbers, sources):
        """Of each layer the first tokens, their keys `dropped` positions further on."""
        rows, ropes = {}, self._model.config.ropes
        for layer in self._model.layers or range(len(ropes)):
            if not self.is_full(layer):
                continue
            group, pool, place = self.place(layer)
            format = pools[pool].format
            keys, values = read_rows(pools[pool], place, sources[group])
            by = shift(ropes[layer], jnp.full(len(keys), numbers[2]))
            keys = format.encode(rotate(format.decode(keys, jnp.dtype(jnp.float32)), by))
            rows[layer] = keys, values
        return rows, None

    def _selected(self, pools, weights, x, numbers, sources):
        """Of each layer the tokens that the last ones look at most, in their order."""
        positions = _looked_back(numbers, self.eviction.looks_back)
        context = _LookingBack(self, pools, sources)
        decoder: Decoder = nnx.merge(self._model.graphdef, self._tree.unflatten(weights))
        if not decoder.first_layer:
            x = decoder.embed_tokens(x)
        x = decoder.run(x, positions, positions + 1, context)
        # Behind the last choice nothing need be computed.
        return context.chosen, None if self._is_last else x


class _LookingBack:
    """The last tokens before an eviction, computed once more over the pages that they saw.

    Attributes:
        chosen: of each layer without a window, keys and values that stay.
    """

    def __init__(self, stage: StageCondenser, pools: Pools, tables: Int[Array, "G P"]):
        self._stage, self._pools, self._tables = stage, pools, tables
        self.chosen: Rows = {}

    def attend(self, layer, q, k, v, spec):
        stage = self._stage
        group, pool, place = stage.place(layer)
        look = partial(self._look, place, spec, stage.is_full(layer))
        if stage.mesh is not None:
            look = jax.shard_map(
                look,
                mesh=stage.mesh,
                in_specs=(HEADS, KV_PAGES, PartitionSpec()),
                out_specs=(HEADS, HEADS),
                check_vma=False,
            )
        out, chosen = look(q, self._pools[pool], self._tables[group])
        if chosen:
            self.chosen[layer] = chosen
        return out

    def _look(self, place, spec, is_full, q, kv, table):
        """Attention of the heads that are on a device, and what stays of theirs."""
        stage = self._stage
        eviction = stage.eviction
        rows = read_rows(kv, place, table)
        keys, values = (kv.format.decode(x, q.dtype).astype(q.dtype) for x in rows)
        # Among what is not evicted, the last tokens are the last of the budget.
        at = jnp.arange(eviction.budget - q.shape[0], eviction.budget)
        out, weights = attend_densely(q, keys, values, spec, at)
        if not is_full:
            return out, ()
        mass = jnp.sum(weights, axis=2)
        if stage.mesh is not None and stage.kv_copies > 1:
            devices = stage.mesh.shape["tensor"]
            of_all = of_all_copies(mass, stage.kv_copies, stage.kv_queries, devices)
        else:
            of_all = jnp.sum(mass, axis=1)
        most = most_attended(of_all, eviction)
        k, v = (jnp.take_along_axis(x, most.T[:, :, None], axis=0) for x in rows)
        return out, (k, v)


def of_all_copies(
    mass: Float[Array, "K G keys"], copies: int, queries: int, devices: int
) -> Float[Array, "K keys"]:
    """Of a device's key-value heads what the queries of all their copies, which lie side by side
    over the axis "tensor", pay attention to.

    Args:
        mass: of each query head on the device.
        queries: that a head has; those behind them, put in to divide them, repeat another.
    """
    K, G, keys = mass.shape
    places = lax.axis_index("tensor") * K + jnp.arange(K)
    query = places[:, None] % copies * G + jnp.arange(G)
    own = jnp.sum(jnp.where(query[:, :, None] < queries, mass, 0), axis=1)
    heads = places // copies
    sums = jnp.zeros((-(-devices * K // copies), keys), mass.dtype)
    return lax.psum(sums.at[heads].add(own), "tensor")[heads]


def _looked_back(numbers: Int[Array, " 3"], count: int) -> Int[Array, " count"]:
    """Positions of the last tokens before an eviction."""
    return numbers[1] - count + jnp.arange(count, dtype=jnp.int32)


def _last_tokens(
    history: Int[Array, "slots max_len"], numbers: Int[Array, " 3"], *, count: int
) -> Int[Array, " count"]:
    return history[numbers[0], _looked_back(numbers, count)]


def _whole(part: StepPrograms) -> Any:
    """The layout of what all devices of a stage have."""
    return part.model.place.sharding(PartitionSpec())


def _ints(shapes: Sequence[tuple[int, ...]], part: StepPrograms) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=_whole(part)) for shape in shapes]


def most_attended(mass: Float[Array, "K keys"], eviction: Eviction) -> Int[Array, "K kept"]:
    """Of each head the tokens that stay, in order: those with most attention paid to them or to
    a neighbour, and the first ones."""
    mass = mass[:, : eviction.budget - eviction.recent]
    mass = lax.reduce_window(mass, -jnp.inf, lax.max, (1, _NEIGHBOURS), (1, 1), "SAME")
    mass = mass.at[:, :SINKS].set(jnp.inf)
    return jnp.sort(lax.top_k(mass, eviction.kept)[1], axis=1)
