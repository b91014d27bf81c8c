"""Which waiting sequences may begin to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from ..cache.manager import KVCache, Match
from ..config import SchedulerConfig
from ..request import FinishReason, Sequence
from .forecast import Forecast, Load, may_stop
from .waiting import WaitingQueue


class Candidate(NamedTuple):
    """A prompt that may be computed now.

    Attributes:
        start: where that would begin.
        end: how far there is room for it.
    """

    seq: Sequence
    start: int
    end: int


class Admission:
    """Looks at the head of the queue, each step.

    A sequence is admitted with pages for all of its tokens (of a window, for those it starts
    with). Unless it ranks before all that run, the forecast must hold for it and for them, but
    for those of a lower priority, which would make way. Nothing overtakes one that there is no
    room for. One whose beginning a sequence that ranks before it is about to compute waits for
    that, and others pass it by.

    The first that there is no room for begins early: it is computed as far as what the others
    are not expected to need, but for its last token. It is admitted once all of it fits, and
    the first to make way until then, as what it loses is least.

    Attributes:
        early: what runs and is not yet admitted, if anything, and how far it may go.
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
        self.early: Candidate | None = None
        self._least_early = config.prefill_chunk_size // 4 if config.enable_chunked_prefill else 0

    def candidates(self, running: Collection[Sequence], seats: int) -> Iterator[Candidate]:
        """The waiting sequences that could begin now, in order.

        Args:
            running: what runs already.
            seats: how many more may.
        """
        if seats <= 0 or not len(self.waiting) or self.early is not None:
            return
        matches: dict[Sequence, Match] = {}

        def match(seq: Sequence) -> Match:
            if seq not in matches:
                matches[seq] = self.cache.match(seq)
            return matches[seq]

        room = _Room(self, running)
        for seq in self.waiting.in_order(lambda seq: match(seq).num_tokens):
            if seq.in_flight or not seats:
                return
            if self.waits(seq, match(seq)):
                continue
            start = match(seq).num_tokens
            if not room.takes(seq, self.cache.needed(seq, match(seq))):
                spare = room.spare() - self.cache.needed(seq, match(seq), start)
                end = self._early_end(seq, start, self.cache.layout.num_blocks(start), spare)
                if end > start:
                    yield Candidate(seq, start, end)
                return
            yield Candidate(seq, start, len(seq.tokens))
            seats -= 1

    def admit(self, at: Candidate, fits: Callable[[int], bool]) -> bool:
        """Gives a sequence its pages and takes it out of the queue.

        Those admitted before it in this step may have taken what it needs: then False.

        Args:
            fits: whether the step holds it if it begins at this position.
        """
        seq, match = at.seq, self.cache.match(at.seq)
        if self.waits(seq, match) or not fits(match.num_tokens) or match.num_tokens >= at.end:
            return False
        needed = self.cache.needed(seq, match)
        if not self.cache.admit(seq, match, at.end):
            return False
        if at.end < len(seq.tokens):
            self.early = at
        elif self.forecast is not None:
            self.forecast.begin(seq, needed)
        self.waiting.begin(seq, match.num_tokens)
        return True

    def review(self, running: Collection[Sequence]) -> Sequence | None:
        """Finds anew how far the early one may go; gives it where all of it has a place now."""
        if self.early is None:
            return None
        seq, cache = self.early.seq, self.cache
        room = _Room(self, [other for other in running if other is not seq])
        held, missing = cache.num_held(seq), cache.missing(seq)
        blocks = max(map(len, seq.block_tables))
        end = self._early_end(seq, seq.num_computed, blocks, room.spare(held))
        self.early = Candidate(seq, seq.num_computed, end)
        return seq if room.goes_first(seq) or room.takes(seq, missing, held) else None

    def _early_end(self, seq: Sequence, start: int, blocks: int, spare: int) -> int:
        """How far one is computed early that has `blocks` pages of a group and may have `spare`
        more; `start`: not at all."""
        layout = self.cache.layout
        size = layout.block_size
        last = min(layout.whole(len(seq.tokens)), len(seq.tokens) - 1) // size * size
        end = min(last, (blocks + spare // layout.num_groups) * size)
        least = min(self._least_early, last - start)
        return end if 0 < least <= end - start else start

    def end_of(self, seq: Sequence) -> int:
        """How far a running prompt may be computed."""
        return self.early.end if self.early and self.early.seq is seq else seq.num_tokens

    def confirm(self) -> None:
        """The early one has got the pages of all its tokens."""
        assert self.early is not None
        seq, self.early = self.early.seq, None
        if self.forecast is not None:
            self.forecast.begin(seq, self.cache.num_held(seq))

    def grown(self, seq: Sequence) -> None:
        """It has one more token and goes on."""
        if self.forecast is not None and may_stop(seq.request.params):
            self.forecast.lengths.grown(seq.output_len)

    def left(self, seq: Sequence) -> None:
        """It runs no more: it was preempted, or has ended."""
        if self.early and self.early.seq is seq:
            self.early = None
        if self.forecast is None:
            return
        self.forecast.end(seq)
        if seq.finish_reason not in (None, FinishReason.LENGTH):
            self.forecast.lengths.ended(seq.output_len)

    def waits(self, seq: Sequence, match: Match) -> bool:
        """Whether one that ranks before it is about to compute what it needs as well."""
        rank = self.waiting.rank
        return match.owner is not None and rank(match.owner) < rank(seq)


class _Room:
    """Pages for more sequences beside those that run.

    Args:
        running: those that are admitted.
    """

    def __init__(self, admission: Admission, running: Collection[Sequence]):
        self._admission = admission
        self._rank = admission.waiting.rank
        self._first = min(map(self._rank, running), default=None)
        self._free, self._seated = admission.cache.num_available, len(running)
        self._load, self._uncounted = Load(), list(running)

    def goes_first(self, seq: Sequence) -> bool:
        return self._first is None or self._rank(seq) < self._first

    def takes(self, seq: Sequence, missing: int, held: int = 0) -> bool:
        """Whether there is room for one of those waiting, in their order; it is counted then.

        Args:
            missing: available pages that it takes.
            held: those it has already and nobody else.
        """
        forecast, rank = self._admission.forecast, self._rank(seq)
        if missing > self._free:
            return False
        if forecast is not None:
            self._count([s for s in self._uncounted if self._rank(s)[0] <= rank[0]])
            own = forecast.load_of(seq, missing + held, self._admission.max_len[seq])
            if not self.goes_first(seq) and not self._holds(self._load + own):
                return False
            self._load += own
        self._free -= missing
        self._seated += 1
        self._first = self._first or rank
        return True

    def spare(self, held: int = 0) -> int:
        """Pages that those counted are not expected to need.

        Args:
            held: by others than these.
        """
        if self._admission.forecast is None:
            return self._free - self._seated  # each may need one before anything comes back
        self._count(list(self._uncounted))
        expected = math.ceil(self._load.most(self._admission.margin)) + held
        return min(self._free, self._admission.cache.pool.num_blocks - expected)

    def _count(self, sequences: list[Sequence]) -> None:
        forecast = self._admission.forecast
        assert forecast is not None
        self._load += forecast.load(sequences, self._admission.max_len)
        self._uncounted = [s for s in self._uncounted if s not in sequences]

    def _holds(self, load: Load) -> bool:
        return load.most(self._admission.margin) <= self._admission.cache.pool.num_blocks
