"""Lets what a long sequence forgets leave its block tables. Pure accounting."""

from __future__ import annotations

from typing import NamedTuple

from ..request import Sequence
from .layout import KVLayout
from .page_store import Condense, PageStore
from .way import Way, resident_pages


class Leaving(NamedTuple):
    """What a sequence gives up as it goes on.

    Attributes:
        dropped: tokens that have left afterwards, in all.
        blocks: that leave, of each group without a window.
        taken: pages that it takes in exchange.
        freed: pages that others may then have.
    """

    dropped: int
    blocks: range
    taken: int
    freed: int


class Evictor:
    """Lets quanta leave the block tables of sequences, in the groups without a window."""

    def __init__(self, layout: KVLayout, store: PageStore):
        self._eviction = layout.eviction
        self._size = layout.block_size
        self._full = [group for group, window in enumerate(layout.windows) if window is None]
        self._store = store

    def due(self, seq: Sequence, way: Way, start: int) -> Leaving | None:
        """What has to leave before the token at `start` is computed. Takes nothing."""
        eviction, size = self._eviction, self._size
        if eviction is None or (dropped := eviction.dropped(start)) == seq.num_dropped:
            return None
        # Sinks are rotated anew from the first pages each time; what is selected is moved on.
        stays = not eviction.selects or seq.num_dropped > 0
        first = (eviction.kept + seq.num_dropped) // size if stays else 0
        blocks = range(first, (eviction.kept + dropped) // size)
        taken = 0 if seq.kept_pages else eviction.kept // size * len(self._full)
        freed = sum(way.holds_alone(group, i) for group in self._full for i in blocks)
        return Leaving(dropped, blocks, taken, freed)

    def carry_out(self, seq: Sequence, way: Way, start: int, leaving: Leaving) -> None:
        """Changes the sequence's pages, and has the device fill those that stand for the past."""
        eviction, size, store = self._eviction, self._size, self._store
        assert eviction is not None
        num_groups = len(seq.block_tables)
        if eviction.selects:
            most = eviction.budget // size
            sources = [resident_pages(seq, g, size)[:most] for g in range(num_groups)]
        else:
            sources = [table[: eviction.kept // size] for table in seq.block_tables]
        # What leaves may be what is taken: the device reads all sources before it writes.
        for group in self._full:
            for i in leaving.blocks:
                way.drop(store, group, seq.block_tables[group], i)
        if not seq.kept_pages:
            seq.kept_pages = [[] for _ in range(num_groups)]
            for group in self._full:
                seq.kept_pages[group] = [store.take() for _ in range(eviction.kept // size)]
        seq.num_dropped = leaving.dropped
        targets = [list(pages) for pages in seq.kept_pages]
        store.transfers.append(Condense(seq.slot, start, leaving.dropped, sources, targets))
