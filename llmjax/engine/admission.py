"""Which waiting sequences may begin to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ..cache.manager import KVCache, Match
from ..config import SchedulerConfig
from ..request import FinishReason, Sequence
from .forecast import Forecast, Load, may_stop
from .waiting import WaitingQueue


class Admission:
    """Looks at the head of the queue, each step.

    A sequence is admitted with pages for all of its tokens (of a window, for those it starts
    with). Unless it ranks before all that run, the forecast must hold for it and for them, but
    for those of a lower priority, which would make way. Nothing overtakes one that there is no
    room for. One whose beginning a sequence that ranks before it is about to compute waits for
    that, and others pass it by.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        waiting: WaitingQueue,
        max_len: dict[Sequence, int],
    ):
        self.cache = cache
        self.waiting = waiting
        self.max_len = max_len
        self.margin = config.forecast_margin or 0.0
        self.forecast = Forecast(cache.layout) if config.forecast_margin is not None else None

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
        first = min(map(rank, running), default=None)
        load, uncounted = Load(), list(running)
        for seq in self.waiting.in_order(lambda seq: match(seq).num_tokens):
            if seq.in_flight:
                return
            if self.waits(seq, match(seq)):
                continue
            needed = self.cache.needed(seq, match(seq))
            free -= needed
            if free < 0 or not seats:
                return
            if self.forecast is not None:
                counted = [s for s in uncounted if rank(s)[0] <= rank(seq)[0]]
                uncounted = [s for s in uncounted if rank(s)[0] > rank(seq)[0]]
                load += self.forecast.load(counted, self.max_len)
                load += self.forecast.load_of(seq, needed, self.max_len[seq])
                goes_first = first is None or rank(seq) < first
                if not goes_first and load.most(self.margin) > self.cache.pool.num_blocks:
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
        needed = self.cache.needed(seq, match)
        if not self.cache.admit(seq, match):
            return False
        if self.forecast is not None:
            self.forecast.begin(seq, needed)
        self.waiting.begin(seq, match.num_tokens)
        return True

    def grown(self, seq: Sequence) -> None:
        """It has one more token and goes on."""
        if self.forecast is not None and may_stop(seq.request.params):
            self.forecast.lengths.grown(seq.output_len)

    def left(self, seq: Sequence) -> None:
        """It runs no more: it was preempted, or has ended."""
        if self.forecast is None:
            return
        self.forecast.end(seq)
        if seq.finish_reason not in (None, FinishReason.LENGTH):
            self.forecast.lengths.ended(seq.output_len)

    def waits(self, seq: Sequence, match: Match) -> bool:
        """Whether one that ranks before it is about to compute what it needs as well."""
        rank = self.waiting.rank
        return match.owner is not None and rank(match.owner) < rank(seq)
