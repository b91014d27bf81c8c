"""Pages by what becomes of them: free, held, idle, or moved to host memory.

An idle page is remembered in the tree and held by nobody. Where no page is free the one that
has been idle longest makes room, to host memory where that is worth it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .block_pool import BlockPool
from .host_pool import HostPool
from .radix_tree import Entry, Node


class Copy(NamedTuple):
    """A page's contents to another page."""

    source: int
    target: int


class Save(NamedTuple):
    """A page's contents to a slot of host memory."""

    page: int
    slot: int


class Load(NamedTuple):
    """A slot's contents to a page."""

    slot: int
    page: int


class Bring(NamedTuple):
    """What another engine has computed to a slot.

    Attributes:
        contents: of a page, one array for each of the device's pools.
    """

    slot: int
    contents: Any


class Condense(NamedTuple):
    """A sequence's pages to those that stand for what it has not forgotten of them.

    Attributes:
        slot: the sequence's.
        position: of the token that is computed next.
        dropped: tokens that have left then.
        sources, targets: pages of each group; all sources are read before a target is written.
    """

    slot: int
    position: int
    dropped: int
    sources: list[list[int]]
    targets: list[list[int]]


Move = Copy | Save | Load | Bring
Transfer = Move | Condense


class Decision(NamedTuple):
    """What became of a page that had to leave, or was wanted again, and why.

    Attributes:
        choice: "save" to the host or "drop"; "load" from there or "recompute".
        pages, tokens: of its node, whose groups leave and come back together.
        seconds_to_move, seconds_to_compute: what was compared. Of a page that leaves it is
            what is to be expected, as it is wanted again with the probability `chance` only.
        reason: in words.
    """

    choice: str
    pages: int
    tokens: int
    seconds_to_move: float
    seconds_to_compute: float
    chance: float
    reason: str


@dataclass
class CacheStats:
    """Counts since the start.

    Attributes:
        queried, hit: tokens of sequences admitted, and those of them that were there.
        copied: pages copied as sequences part.
        evicted: idle pages that made room.
    """

    queried: int = 0
    hit: int = 0
    copied: int = 0
    evicted: int = 0


class PageStore:
    """The pages of `pool`, and what moves between them and host memory.

    Args:
        host: where pages may go to; None drops them.
        on_empty: called with a node of which an entry was emptied.

    Attributes:
        transfers: what the device is to copy before its next step, in this order.
        on_decision: where given, told of each page that moves, and each that could and does not.
    """

    def __init__(self, pool: BlockPool, host: HostPool | None, on_empty: Callable[[Node], None]):
        self.pool = pool
        self.host = host
        self.stats = CacheStats()
        self.transfers: list[Transfer] = []
        self.idle: OrderedDict[Entry, None] = OrderedDict()
        self.on_decision: Callable[[Decision], None] | None = None
        self._on_empty = on_empty
        if host is not None:
            host.on_drop = on_empty

    @property
    def num_available(self) -> int:
        """Pages that could be had: free or idle."""
        return self.pool.num_free + len(self.idle)

    def is_there(self, entry: Entry) -> bool:
        """Whether its page need not be computed."""
        if entry.page is not None or entry.slot is None or self.host is None:
            return entry.page is not None
        if self.host.is_brought(entry):
            return True
        return self.host.costs.worth_loading(len(entry.node.entries), len(entry.node.tokens))

    def hold(self, entry: Entry) -> None:
        if not entry.refs and entry.page is not None:
            del self.idle[entry]
        entry.refs += 1

    def drop(self, entry: Entry) -> None:
        entry.refs -= 1
        if not entry.refs and entry.page is not None:
            self.idle[entry] = None

    def take(self) -> int:
        """A page, where there is one to be had."""
        if not self.pool.num_free:
            self._evict()
        pages = self.pool.allocate(1)
        assert pages is not None
        return pages[0]

    def give(self, entry: Entry, page: int) -> None:
        """Puts a sequence's page into the tree; the sequence still holds it."""
        entry.page, entry.refs = page, 1
        if entry.slot is not None and self.host is not None:
            self.host.drop(entry)

    def page_of(self, entry: Entry) -> int:
        """The page of an entry that is held, brought back from the host if it is there."""
        if entry.page is None:
            entry.page = self.take()
            self._load(entry, entry.page)
        return entry.page

    def weigh_loading(self, node: Node, choice: str) -> Decision:
        """Why a node that host memory has is a "load", or a "recompute" nevertheless."""
        assert self.host is not None
        size = len(node.entries), len(node.tokens)
        costs = self.host.costs.of_loading(*size)
        apart = choice == "recompute" and costs[0] < costs[1]
        reason = "what comes before it is gone" if apart else _compared(*costs)
        if choice == "load" and any(map(self.host.is_brought, node.entries)):
            reason = "a prefill worker has computed it"
        return Decision(choice, *size, *costs, 1.0, reason)

    def copy(self, entry: Entry, page: int) -> None:
        """Another page with what an entry that is held has."""
        if entry.page is not None:
            self.transfers.append(Copy(entry.page, page))
            self.stats.copied += 1
        else:
            self._load(entry, page)

    def clear(self, entry: Entry) -> None:
        """Empties an entry that nobody holds."""
        if entry.page is not None:
            del self.idle[entry]
            self._free(entry)
        if entry.slot is not None and self.host is not None:
            self.host.drop(entry)

    def _load(self, entry: Entry, page: int) -> None:
        assert self.host is not None and entry.slot is not None
        if self.on_decision is not None:
            self.on_decision(self.weigh_loading(entry.node, "load"))
        self.transfers.append(Load(entry.slot, page))
        self.host.drop(entry)
        self.host.num_loaded += 1

    def _evict(self) -> None:
        entry = next(iter(self.idle))
        page, node = entry.page, entry.node
        assert page is not None
        del self.idle[entry]
        self.stats.evicted += 1
        if self._is_worth_saving(node) and self.host is not None and self.host.take(entry):
            assert entry.slot is not None
            self.transfers.append(Save(page, entry.slot))
        if self.on_decision is not None:
            self.on_decision(self._weigh_saving(node, "drop" if entry.slot is None else "save"))
        self._free(entry)
        self._on_empty(node)

    def _is_worth_saving(self, node: Node) -> bool:
        if self.host is None:
            return False
        size = len(node.entries), len(node.tokens)
        return self.host.costs.worth_saving(*size, self._chance(node))

    def _chance(self, node: Node) -> float:
        """How likely a node is wanted again."""
        return 1.0 if node.waiters else self.stats.hit / max(1, self.stats.queried)

    def _weigh_saving(self, node: Node, choice: str) -> Decision:
        size, chance = (len(node.entries), len(node.tokens)), self._chance(node)
        if self.host is None:
            return Decision(choice, *size, 0.0, 0.0, chance, "there is no host memory for pages")
        costs = self.host.costs.of_saving(*size, chance)
        full = choice == "drop" and costs[0] < costs[1]
        reason = "host memory is full of what is wanted" if full else _compared(*costs)
        return Decision(choice, *size, *costs, chance, reason)

    def _free(self, entry: Entry) -> None:
        assert entry.page is not None
        self.pool.free([entry.page])
        entry.page = None


def _compared(move: float, compute: float) -> str:
    sign = "<" if move < compute else ">="
    return f"{1e3 * move:.4g} ms to move {sign} {1e3 * compute:.4g} ms to compute"
