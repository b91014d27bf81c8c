"""A running sequence's way through the tree, and the pages it holds on it."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Sequence
from .page_store import PageStore
from .radix_tree import Node

GONE = -1
"""In a block table: a page that was given back, behind the window or evicted."""


@dataclass(slots=True)
class Way:
    """A running sequence's way through the tree.

    Attributes:
        path: the nodes of its first pages.
        num_ready: how many of these are computed, or will be by the steps planned.
        tail: the node of the end of its prompt, behind `path`.
        first_held: of each group: the pages before it have been given back.
        closed: another's page stands in the tree where this one's next would; what follows
            is remembered when the sequence lets go.
    """

    root: Node
    path: list[Node]
    num_ready: int
    first_held: list[int]
    tail: Node | None = None
    closed: bool = False

    @property
    def end(self) -> Node:
        return self.path[-1] if self.path else self.root

    def holds_alone(self, group: int, block: int) -> bool:
        """Whether the page of a block is to be had once this sequence gives it back."""
        return block >= len(self.path) or self.path[block].entries[group].refs == 1

    def drop(self, store: PageStore, group: int, table: list[int], block: int) -> None:
        """Gives the page of a block back."""
        if block < len(self.path):
            store.drop(self.path[block].entries[group])
        else:
            if block == len(self.path):
                self.forget_tail()
            store.pool.free([table[block]])
        table[block] = GONE

    def forget_tail(self) -> None:
        """The page is the sequence's own again: nobody else holds the beginning of a page."""
        if self.tail is None:
            return
        for entry in self.tail.entries:
            entry.page, entry.refs = None, 0
        self.tail.detach()
        self.tail = None


def resident_pages(seq: Sequence, group: int, block_size: int, have: int = 0) -> list[int]:
    """The pages that hold what a sequence has not forgotten, in order; -1 behind a window.

    Args:
        have: leave out so many.
    """
    kept = seq.kept_pages[group][have:] if seq.kept_pages else []
    first = seq.num_dropped // block_size + have + len(kept)
    return kept + seq.block_tables[group][first:]
