"""Which pages of the KV pool are free. Pure accounting: no device, no contents."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Pages 0 to `num_blocks - 1`, each free or used by one owner.

    A page freed last is handed out first: its lines are the likeliest to be in a cache.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} pages, allowed: 1 or more")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """`n` page ids, or None (and nothing taken) where fewer are free."""
        if n < 0:
            raise ValueError(f"{n} pages asked for, allowed: 0 or more")
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        ids = self._free[cut:]
        del self._free[cut:]
        for block in ids:
            self._is_used[block] = 1
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Gives pages back.

        Raises:
            RuntimeError: an id is not of this pool or not in use. Pages are then counted
                wrongly somewhere, and going on would mix up two sequences' contexts.
        """
        for block in ids:
            if not 0 <= block < self.num_blocks:
                raise RuntimeError(f"page {block} freed, the pool has 0 to {self.num_blocks - 1}")
            if not self._is_used[block]:
                raise RuntimeError(f"page {block} freed while it is free")
            self._is_used[block] = 0
            self._free.append(block)
