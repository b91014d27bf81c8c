"""Which waiting sequences may begin to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ..cache.manager import KVCache, Match
from ..config import SchedulerConfig
from ..request import Sequence
from .waiting import WaitingQueue


class Admission:
    """Looks at the head of the queue, each step.

    A sequence is admitted with pages for all of its tokens (of a window, for those it starts
    with), above the watermark unless nothing that ranks before it runs. Nothing overtakes one
    that there is no room for. One whose beginning a sequence that ranks before it is about to
    compute waits for that, and others pass it by.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache, waiting: WaitingQueue):
        self.config = config
        self.cache = cache
        self.waiting = waiting

    def candidates(
        self, running: Collection[Sequence], seats: int
    ) -> Iterator[tuple[Sequence, int]]:
        """The waiting sequences that could begin now, in order, and where they would.

        Args:
            running: what runs already.
            seats: how many more may.
        """
        if seats <= 0 or not len(self.waiting):
            return
        rank = self.waiting.rank
        matches: dict[Sequence, Match] = {}

        def match(seq: Sequence) -> Match:
            if seq not in matches:
                matches[seq] = self.cache.match(seq)
            return matches[seq]

        free = self.cache.num_available
        watermark = self.config.watermark * self.cache.pool.num_blocks
        # Kept for those who rank before the one that comes.
        first = min(map(rank, running), default=None)
        for seq in self.waiting.in_order(lambda seq: match(seq).num_tokens):
            if seq.in_flight:
                return
            if self.waits(seq, match(seq)):
                continue
            free -= self.cache.needed(seq, match(seq))
            reserve = watermark if first is not None and first < rank(seq) else 0
            if free < reserve or not seats:
                return
            yield seq, match(seq).num_tokens
            seats -= 1
            first = first or rank(seq)

    def admit(self, seq: Sequence, fits: Callable[[int], bool]) -> bool:
        """Gives a sequence its pages and takes it out of the queue.

        Those admitted before it in this step may have taken what it needs: then False.

        Args:
            fits: whether the step holds it if it begins at this position.
        """
        match = self.cache.match(seq)
        if self.waits(seq, match) or not fits(match.num_tokens):
            return False
        if not self.cache.admit(seq, match):
            return False
        self.waiting.begin(seq, match.num_tokens)
        return True

    def waits(self, seq: Sequence, match: Match) -> bool:
        """Whether one that ranks before it is about to compute what it needs as well."""
        rank = self.waiting.rank
        return match.owner is not None and rank(match.owner) < rank(seq)
