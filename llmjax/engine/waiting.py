"""Sequences that wait to run, in the order in which they are to be considered."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from ..request import Sequence

Rank = tuple[int, int]


class WaitingQueue:
    """Waiting sequences by rank: one that was preempted comes back to its old place.

    Args:
        by_priority: a request's priority comes before its arrival; lower goes first.
    """

    def __init__(self, *, by_priority: bool):
        self._by_priority = by_priority
        self._ranks: list[Rank] = []
        self._sequences: dict[Rank, Sequence] = {}
        self._of_request: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; of the queue as it is now, whatever is taken from it meanwhile."""
        return iter([self._sequences[rank] for rank in self._ranks])

    @property
    def num_requests(self) -> int:
        return len(self._of_request)

    def rank(self, seq: Sequence) -> Rank:
        """Sequences of a lower rank are considered first, waiting or running."""
        return (seq.request.options.priority if self._by_priority else 0, seq.arrival)

    def first(self, count: int) -> list[Sequence]:
        return [self._sequences[rank] for rank in self._ranks[:count]]

    def add(self, seq: Sequence) -> None:
        rank = self.rank(seq)
        insort(self._ranks, rank)
        self._sequences[rank] = seq
        self._of_request[seq.request.id] += 1

    def remove(self, seq: Sequence) -> None:
        rank = self.rank(seq)
        del self._sequences[rank]
        del self._ranks[bisect_left(self._ranks, rank)]
        self._of_request[seq.request.id] -= 1
        if not self._of_request[seq.request.id]:
            del self._of_request[seq.request.id]
