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

    The first that there is no room for begins early: it is computed on pages that the others are
    not expected to need, but for its last token. It still waits to be admitted, is in nobody's
    way while it does, and of its priority the first to make way, as what it loses is least.

    Attributes:
        early: what runs and is not admitted, if anything.
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
        self.early: Sequence | None = None
        self._early_end = 0
        # A smaller piece is not worth a step with a prompt in it. Prompts that go whole cannot.
        self._least = -(-config.prefill_chunk_size // 4) if config.enable_chunked_prefill else None

    def candidates(self, running: Collection[Sequence], seats: int) -> Iterator[Candidate]:
        """The waiting sequences that could begin now, in order; the last may do so early.

        Args:
            running: what runs already.
            seats: how many more may.
        """
        if seats <= 0 or not len(self.waiting):
            return
        rank, early = self.waiting.rank, self.early
        matches: dict[Sequence, Match] = {}

        def match(seq: Sequence) -> Match:
            if seq not in matches:
                matches[seq] = self.cache.match(seq)
            return matches[seq]

        room, passed_by = _Budget(self, running), False
        for seq in self.waiting.in_order(lambda seq: match(seq).num_tokens):
            if seq.in_flight or not seats or (early is not None and rank(early) < rank(seq)):
                return
            if self.waits(seq, match(seq)):
                passed_by = True
                continue
            start = match(seq).num_tokens
            if not room.takes(seq, self.cache.needed(seq, match(seq))):
                spare = room.spare() - self.cache.needed(seq, match(seq), start)
                end = self._far(
                    seq, start, start // self.cache.layout.block_size, spare, self._least
                )
                # It would keep back those that it passes by, until there is room for all of it.
                if early is None and end > start and not passed_by:
                    yield Candidate(seq, start, end)
                return
            yield Candidate(seq, start, len(seq.tokens))
            seats -= 1

    def admit(self, at: Candidate, fits: Callable[[int], bool]) -> bool:
        """Gives a sequence the pages before `at.end` and takes it out of the queue.

        Those admitted before it in this step may have taken what it needs: then False.

        Args:
            at: of `candidates`; where it begins may have changed since.
            fits: whether the step holds it if it begins at this position.
        """
        seq, match = at.seq, self.cache.match(at.seq)
        if self.waits(seq, match) or not fits(match.num_tokens) or match.num_tokens >= at.end:
            return False
        needed = self.cache.needed(seq, match)
        if not self.cache.admit(seq, match, at.end):
            return False
        if at.end < len(seq.tokens):
            self.early, self._early_end = seq, at.end
        elif self.forecast is not None:
            self.forecast.begin(seq, needed)
        self.waiting.begin(seq, match.num_tokens)
        return True

    def review(self, running: Collection[Sequence]) -> Sequence | None:
        """Admits what began early, where there is room for all of it, and returns it then; else
        finds anew how far it may go."""
        seq, cache = self.early, self.cache
        if seq is None:
            return None
        room, held, missing = _Budget(self, running), cache.num_held(seq), cache.missing(seq)
        if self.head is seq and room.takes(seq, missing, held):
            cache.complete(seq)
            self.early = None
            if self.forecast is not None:
                self.forecast.begin(seq, held + missing)
            return seq
        blocks = max(map(len, seq.block_tables))
        # Alone it goes on, or nothing does.
        least = 0 if self._least and len(running) == 1 else self._least
        self._early_end = self._far(seq, seq.num_computed, blocks, room.spare(held), least)
        return None

    @property
    def head(self) -> Sequence | None:
        """Who is to be admitted next: what began early, or the first that waits."""
        first, rank = next(self.waiting.in_order(lambda _: 0), None), self.waiting.rank
        if self.early is None or (first is not None and rank(first) < rank(self.early)):
            return first
        return self.early

    def _far(self, seq: Sequence, start: int, blocks: int, spare: int, least: int | None) -> int:
        """How far one is computed early that has `blocks` pages of a group and may have `spare`
        more; `start`: not at all.

        Args:
            least: tokens that are worth it; None is no part of a prompt.
        """
        layout, size = self.cache.layout, self.cache.layout.block_size
        last = min(layout.whole(len(seq.tokens)), len(seq.tokens) - 1) // size * size
        held = max(start, min(last, blocks * size))
        end = min(last, (blocks + max(0, spare) // layout.num_groups) * size)
        if least is None or end - start < min(least, last - start):
            return held
        return max(held, end)

    def end_of(self, seq: Sequence) -> int:
        """How far a running prompt may be computed."""
        return self._early_end if seq is self.early else seq.num_tokens

    def grown(self, seq: Sequence) -> None:
        """It has one more token and goes on."""
        if self.forecast is not None and may_stop(seq.request.params):
            self.forecast.lengths.grown(seq.output_len)

    def left(self, seq: Sequence) -> None:
        """It runs no more: it was preempted, or has ended."""
        if seq is self.early:
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


class _Budget:
    """Pages for more sequences beside those that are admitted.

    Args:
        running: what runs; the early one is not counted.
    """

    def __init__(self, admission: Admission, running: Collection[Sequence]):
        self._admission, self._forecast = admission, admission.forecast
        self._rank = admission.waiting.rank
        admitted = [seq for seq in running if seq is not admission.early]
        self._first = min(map(self._rank, admitted), default=None)
        self._free, self._seated = admission.cache.num_available, len(admitted)
        self._load, self._uncounted = Load(), admitted

    def takes(self, seq: Sequence, missing: int, held: int = 0) -> bool:
        """Whether there is room for one of those waiting, in their order; it is counted then.

        Args:
            missing: available pages that it takes.
            held: those it has already and nobody else.
        """
        if missing > self._free:
            return False
        rank = self._rank(seq)
        if self._forecast is not None:
            self._count(rank[0])
            load = self._load + self._forecast.load_of(
                seq, missing + held, self._admission.max_len[seq]
            )
            goes_first = self._first is None or rank < self._first
            if not goes_first and load.most(self._admission.margin) > self._num_pages:
                return False
            self._load = load
        self._free -= missing
        self._seated += 1
        self._first = self._first or rank
        return True

    def spare(self, held: int = 0) -> int:
        """Pages that those counted, and any of a lower priority, are not expected to need.

        Args:
            held: by others than these.
        """
        if self._forecast is None:
            # Each may need one of each group before anything comes back.
            return self._free - self._seated * self._admission.cache.layout.num_groups
        load = self._load + self._forecast.load(self._uncounted, self._admission.max_len)
        return min(
            self._free, self._num_pages - math.ceil(load.most(self._admission.margin)) - held
        )

    @property
    def _num_pages(self) -> int:
        return self._admission.cache.pool.num_blocks

    def _count(self, priority: float) -> None:
        """Those of this priority or a higher one, which would not make way."""
        rank = self._rank
        counted = [seq for seq in self._uncounted if rank(seq)[0] <= priority]
        if counted and self._forecast is not None:
            self._load += self._forecast.load(counted, self._admission.max_len)
            self._uncounted = [seq for seq in self._uncounted if rank(seq)[0] > priority]
