"""Pages that left the device for host memory: which slots are free, and what goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .radix_tree import Entry, Node


@dataclass
class MoveCosts:
    """What it takes to move a page and to compute a token, in seconds, as measured.

    Attributes:
        save, load: of one page to the host, and back.
        compute: of one prompt token.
    """

    save: float = 0.0
    load: float = 0.0
    compute: float = 1.0

    def of_loading(self, pages: int, tokens: int) -> tuple[float, float]:
        """What it takes to bring `pages` back, and to compute the `tokens` that they hold."""
        return pages * self.load, tokens * self.compute

    def of_saving(self, pages: int, tokens: int, chance: float) -> tuple[float, float]:
        """What is to be expected of saving pages that are wanted again with this probability,
        and of computing them in that case."""
        load, compute = self.of_loading(pages, tokens)
        return pages * self.save + chance * load, chance * compute

    def worth_loading(self, pages: int, tokens: int) -> bool:
        """Whether bringing `pages` back beats computing the `tokens` that they hold."""
        move, compute = self.of_loading(pages, tokens)
        return move < compute

    def worth_saving(self, pages: int, tokens: int, chance: float) -> bool:
        """The same, of pages that are wanted again with this probability only."""
        move, compute = self.of_saving(pages, tokens, chance)
        return move < compute


class HostPool:
    """Slots in host memory, each of one page.

    Args:
        num_slots: in all.
        num_cached: how many of them may hold what no preempted sequence waits for.

    Attributes:
        num_saved, num_loaded: pages moved so far.
        num_brought: pages of other engines that came so far.
        on_drop: called with the node of an entry that had to leave.
    """

    def __init__(self, num_slots: int, num_cached: int, costs: MoveCosts):
        self.num_slots = num_slots
        self.num_cached = num_cached
        self.costs = costs
        self.num_saved = 0
        self.num_loaded = 0
        self.num_brought = 0
        self.on_drop: Callable[[Node], None] = lambda node: None
        self._free = list(range(num_slots - 1, -1, -1))
        # Of each, whether another engine has computed it.
        self._entries: OrderedDict[Entry, bool] = OrderedDict()

    @classmethod
    def sized(
        cls, swap_space: float, kv_offloading_size: float, page_bytes: int, costs: MoveCosts
    ) -> HostPool | None:
        """A pool of so many GiB; None where not a page fits."""
        swap, offload = (int(gib * 2**30 / page_bytes) for gib in (swap_space, kv_offloading_size))
        return cls(swap + offload, offload, costs) if swap + offload else None

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_to_be_had(self) -> int:
        """Slots for what is wanted: free, or of pages that are not."""
        return len(self._free) + sum(_is_unwanted(entry) for entry in self._entries)

    def is_brought(self, entry: Entry) -> bool:
        """Whether another engine has computed what its slot holds: so that it need not be
        computed here, however fast that were."""
        return self._entries.get(entry, False)

    def take(self, entry: Entry, *, is_brought: bool = False) -> bool:
        """Gives an entry a slot, at the cost of the one saved longest ago; or not."""
        is_wanted = entry.node.waiters > 0
        while not self._free or (not is_wanted and self.num_used >= self.num_cached):
            unwanted = next(filter(_is_unwanted, self._entries), None)
            if unwanted is None:
                return False
            self.drop(unwanted)
            self.on_drop(unwanted.node)
        entry.slot = self._free.pop()
        self._entries[entry] = is_brought
        self.num_brought += is_brought
        self.num_saved += not is_brought
        return True

    def drop(self, entry: Entry) -> None:
        """Frees an entry's slot."""
        assert entry.slot is not None
        del self._entries[entry]
        self._free.append(entry.slot)
        entry.slot = None


def _is_unwanted(entry: Entry) -> bool:
    return not (entry.refs or entry.node.waiters)
