"""Pages from one place to another: within the device's pool, to host memory and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from llmjax_kernels.layout import PagedKV

from ..cache.page_store import Bring, Copy, Load, Move, Save
from ..parallel.local import from_local, local_shape, local_values

Pools = tuple[PagedKV, ...]

AT_ONCE = 16
"""Pages that one call of a program moves."""


class PageMover:
    """Carries out transfers, in order.

    What is saved reaches the host while the next steps run; it is waited for only where it is
    wanted back.

    Where pools are spread over devices, host memory holds what this process has of each page.

    Args:
        pools: shapes of the device's pools, and how they are laid out.
        axis: of the pages in each array.
        num_slots: pages that host memory holds; its pages are touched as they are used.
        puts: whether `put` is wanted.

    Attributes:
        programs: all that it runs on the device.
    """

    def __init__(self, pools: Pools, *, axis: int, num_slots: int, puts: bool = False):
        self._axis = axis
        self._shapes = pools
        self._copy = self._compile(self._copy_pages, pools, _ids(), _ids())
        self.programs = [self._copy]
        self._on_the_way: list[tuple[list[int], Any]] = []
        if num_slots or puts:
            self._scatter = self._compile(self._scatter_pages, pools, _ids(), self._rows)
            self.programs.append(self._scatter)
        if num_slots:
            self._most = min(num_slots, jax.tree.leaves(pools)[0].shape[axis])
            held = [(local_shape(row.sharding, row.shape)[1:], row.dtype) for row in self._rows]
            self._slots = [np.empty((num_slots, *shape), dtype) for shape, dtype in held]
            self.programs.append(self._gather)

    @cached_property
    def _gather(self) -> Any:
        out = [row.sharding for row in self._rows]
        jitted = jax.jit(self._gather_pages, out_shardings=out)
        return jitted.lower(self._shapes, _ids()).compile()

    @cached_property
    def _rows(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of `AT_ONCE` pages. Pools that are laid out over devices have pages as their
        first axis, as these have, and are laid out alike."""
        return [
            jax.ShapeDtypeStruct((AT_ONCE, *shape), dtype, sharding=leaf.sharding)
            for leaf, (shape, dtype) in zip(jax.tree.leaves(self._shapes), self.arrays, strict=True)
        ]

    @property
    def arrays(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of what each pool keeps of a page."""
        leaves = jax.tree.leaves(self._shapes)
        return tuple((tuple(np.delete(x.shape, self._axis).tolist()), x.dtype) for x in leaves)

    def read(self, pools: Pools, pages: Sequence[int]) -> list[Array]:
        """What up to `AT_ONCE` pages hold, by pool: [AT_ONCE, *its shape], on the device."""
        return self._gather(pools, _column(pages))

    def run(self, pools: Pools, transfers: Iterable[Move]) -> Pools:
        """The pools after the transfers; the given ones are donated."""
        for kind, run in groupby(transfers, type):
            while part := list(islice(run, AT_ONCE)):
                if kind is Copy:
                    pools = self._copy(pools, *_columns(part))
                elif kind is Save:
                    self._save(pools, part)
                elif kind is Bring:
                    self._bring(part)
                else:
                    pools = self._load(pools, part)
        return pools

    def time(self, pools: Pools) -> tuple[Pools, tuple[float, float]]:
        """The pools as they were, and the seconds that saving and loading a page take.

        Nothing that slots or pages hold is of use yet.
        """
        seconds = []
        for kind in (Save, Load):
            each = []
            for _ in range(3):
                began = time.perf_counter()
                ids = range(min(AT_ONCE, self._most))
                pools = self.run(pools, [kind(i, i) for i in ids])
                self.settle()
                jax.block_until_ready(pools)
                each.append((time.perf_counter() - began) / len(ids))
            seconds.append(min(each))
        return pools, (seconds[0], seconds[1])

    def put(self, pools: Pools, pages: list[int], rows: list[Array]) -> Pools:
        """The pools with other contents in up to `AT_ONCE` pages; the given ones are donated.

        Args:
            rows: of each array of the pools, `AT_ONCE` pages as `_gather_pages` gives them.
        """
        return self._scatter(pools, _column(pages), rows)

    def settle(self) -> None:
        """Takes in what has been saved."""
        for slots, rows in self._on_the_way:
            for store, row in zip(self._slots, rows, strict=True):
                store[slots] = local_values(row)[: len(slots)]
        self._on_the_way.clear()

    def forget(self) -> None:
        """What has been saved and not taken in will not be wanted back."""
        self._on_the_way.clear()

    def _save(self, pools: Pools, saves: Sequence[Any]) -> None:
        rows = self.read(pools, [save.page for save in saves])
        for row in rows:
            row.copy_to_host_async()
        self._on_the_way.append(([save.slot for save in saves], rows))

    def _bring(self, brought: Sequence[Any]) -> None:
        self.settle()  # or what was saved there before would come later
        for slot, contents in brought:
            for store, row in zip(self._slots, contents, strict=True):
                store[slot] = row

    def _load(self, pools: Pools, loads: Sequence[Any]) -> Pools:
        self.settle()
        slots, pages = _columns(loads)
        # A copy: the slots may be taken again before the device has read them.
        rows = [
            from_local(store[np.maximum(slots, 0)], row.sharding, row.shape)
            for store, row in zip(self._slots, self._rows, strict=True)
        ]
        return self._scatter(pools, pages, rows)

    # The programs. An id of -1 is padding, which a loop over the true count leaves out.

    def _copy_pages(self, pools: Pools, sources: Array, targets: Array) -> Pools:
        def copy(i: Array, pools: Pools) -> Pools:
            def one(pool: Array) -> Array:
                return self._put(pool, self._get(pool, sources[i]), targets[i])

            return jax.tree.map(one, pools)

        return lax.fori_loop(0, _count(sources), copy, pools)

    def _gather_pages(self, pools: Pools, pages: Array) -> list[Array]:
        ids = jnp.maximum(pages, 0)
        leaves = jax.tree.leaves(pools)
        return [jnp.moveaxis(jnp.take(leaf, ids, self._axis), self._axis, 0) for leaf in leaves]

    def _scatter_pages(self, pools: Pools, pages: Array, rows: list[Array]) -> Pools:
        leaves, treedef = jax.tree.flatten(pools)

        def put(i: Array, leaves: list[Array]) -> list[Array]:
            return [
                self._put(leaf, jnp.expand_dims(row[i], self._axis), pages[i])
                for leaf, row in zip(leaves, rows, strict=True)
            ]

        return jax.tree.unflatten(treedef, lax.fori_loop(0, _count(pages), put, leaves))

    def _get(self, pool: Array, page: Array) -> Array:
        return lax.dynamic_slice_in_dim(pool, page, 1, self._axis)

    def _put(self, pool: Array, row: Array, page: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(pool, row, page, self._axis)

    def _compile(self, function: Any, *shapes: Any) -> Any:
        out = jax.tree.map(lambda pool: pool.sharding, shapes[0])
        return jax.jit(function, donate_argnums=0, out_shardings=out).lower(*shapes).compile()


def _ids() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((AT_ONCE,), jnp.int32)


def _count(ids: Array) -> Array:
    return jnp.sum(ids >= 0, dtype=jnp.int32)


def _column(ids: Sequence[int]) -> np.ndarray:
    column = np.full(AT_ONCE, -1, np.int32)
    column[: len(ids)] = ids
    return column


def _columns(transfers: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    first, second = zip(*transfers, strict=True)
    return _column(first), _column(second)
