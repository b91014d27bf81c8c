"""Which layers keep their keys and values in which pages.

A page holds `block_size` tokens of a few layers. Layers that see the whole context and layers
that see a window of it keep different tokens, so they are put into groups of as many layers
each, and every group of a sequence has a block table of its own. All pages are of one size and
come from one pool, whatever group they serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .eviction import Eviction

MAX_GROUPS = 8
"""Block tables travel to the device each step, one a group."""
KEYS_AT_ONCE = 64
"""Attention starts to read a window at a multiple of so many tokens."""


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model's layers.

    Attributes:
        block_size: tokens in a page.
        windows: of each group: tokens that a token sees, itself counted; None is all before.
        layers_per_page: layers in a group; the last group of a window may have fewer.
        places: group and index in it of each layer.
        eviction: what a long sequence forgets in the groups without a window.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    layers_per_page: int = 1
    places: tuple[tuple[int, int], ...] = ((0, 0),)
    eviction: Eviction | None = None

    @classmethod
    def of(
        cls,
        windows: Sequence[int | None],
        *,
        block_size: int,
        max_model_len: int,
        eviction: Eviction | None = None,
    ) -> KVLayout:
        """Groups layers so that least of a page stays empty.

        Args:
            windows: of each layer.
            max_model_len: a window that is no shorter than this, or than what a sequence keeps,
                is none.
        """
        most = max_model_len if eviction is None else eviction.budget
        kept = [None if w is None or w >= most else w for w in windows]
        counts = Counter(kept)

        def groups(size: int) -> int:
            return sum(-(-count // size) for count in counts.values())

        sizes = [s for s in range(1, len(kept) + 1) if groups(s) <= MAX_GROUPS]
        size = min(sizes, key=lambda s: (s * groups(s), groups(s)))
        group_windows: list[int | None] = []
        filling: dict[int | None, tuple[int, int]] = {}
        places = []
        for window in kept:
            group, index = filling.get(window, (0, size))
            if index == size:
                group, index = len(group_windows), 0
                group_windows.append(window)
            places.append((group, index))
            filling[window] = (group, index + 1)
        return cls(block_size, tuple(group_windows), size, tuple(places), eviction)

    def stage(self, layers: range) -> KVLayout:
        """Where some of the layers have their keys and values, where no others are.

        Pages keep their numbers; of each there is what these layers keep in it.
        """
        kept = sorted({self.places[layer][1] for layer in layers})
        index = {old: new for new, old in enumerate(kept)}
        # Places of layers that are not here are not asked for.
        places = tuple((group, index.get(at, -1)) for group, at in self.places)
        return replace(self, layers_per_page=len(kept), places=places)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def num_blocks(self, num_tokens: int) -> int:
        """Pages of one group that hold `num_tokens` from the start."""
        return -(-num_tokens // self.block_size)

    def whole(self, num_tokens: int) -> int:
        """Of so many tokens the first, of which none is evicted while they are all there are."""
        return num_tokens if self.eviction is None else min(num_tokens, self.eviction.budget)

    def run_end(self, position: int, num_tokens: int) -> int:
        """How far of `num_tokens` a run from `position` on goes before tokens are evicted."""
        if self.eviction is None:
            return num_tokens
        return min(num_tokens, self.eviction.run_end(position))

    @property
    def most_blocks(self) -> int | None:
        """Pages of a group without a window that a sequence ever holds; None: as it gets longer."""
        return None if self.eviction is None else self.eviction.most_held // self.block_size

    def held_blocks(self, num_tokens: int) -> int:
        """Pages of a group without a window that one of so many tokens holds at most."""
        blocks, most = self.num_blocks(num_tokens), self.most_blocks
        return blocks if most is None else min(blocks, most)

    def first_block(self, group: int, position: int) -> int:
        """The first block of which a query at `position`, or a later one, reads anything."""
        window = self.windows[group]
        if window is None:
            return 0
        unit = max(KEYS_AT_ONCE, self.block_size)
        return max(0, position - window + 1) // unit * unit // self.block_size

    def describe_reuse(self) -> str:
        """Which beginnings another sequence can take over, for people."""
        unit = f"in units of {self.block_size} tokens"
        if not (windows := sorted({w for w in self.windows if w is not None})):
            return unit
        sizes = " and ".join(map(str, windows))
        return (
            f"{unit}; a beginning can be had while there is what windows of {sizes} tokens see at "
            f"its end, from a multiple of {max(KEYS_AT_ONCE, self.block_size)} on"
        )

    def most_pages(self, num_tokens: int, chunk: int) -> int:
        """Pages of all groups that a sequence of `num_tokens` ever holds at once.

        Args:
            chunk: most tokens of it in a step.
        """
        blocks = self.num_blocks(num_tokens)
        pages = 0
        for window in self.windows:
            if window is None:
                pages += self.held_blocks(num_tokens)
            else:
                unit = max(KEYS_AT_ONCE, self.block_size)
                pages += min(blocks, self.num_blocks(window + chunk + unit) + 3)
        return pages
