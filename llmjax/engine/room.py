"""Pages and seats for those who need them, at the cost of others that run. No jax."""

from __future__ import annotations

from ..cache.manager import KVCache
from ..config import SchedulerConfig
from ..request import Sequence
from .buckets import Buckets
from .lives import Lives


class Room:
    """Preempts where there is not enough; see the rules in `scheduler.py`.

    Attributes:
        num_promised: sequences that sit this step out, for pages that are on their way back.
    """

    def __init__(self, config: SchedulerConfig, buckets: Buckets, cache: KVCache, lives: Lives):
        self._policy, self._fair_users = config.scheduling_policy, config.fair_users
        self._buckets, self._cache, self._lives = buckets, cache, lives
        self.num_promised = 0

    def make_way(self) -> None:
        """Begins a step: preempts what one that is not admitted needs and that ranks behind it,
        and admits what began early where there is room for it."""
        self.num_promised = 0
        self._preempt_for_head()
        self._lives.review()

    def _preempt_for_head(self) -> None:
        head, early = self._lives.admission.head, self._lives.admission.early
        if head is None:
            return
        while any(self._makes_way(s, head) for s in self._lives.running):
            seats = min(
                self._buckets.max_seqs - len(self._lives.running),
                len(self._lives.free_slots) + sum(s.slot >= 0 for s in self._lives.leaving),
            )
            pages = self._cache.num_available + self._lives.pages_coming
            if (head is early or seats > 0) and self._lacks(head) <= pages:
                return
            self._lives.preempt(self._victim(head))

    def _lacks(self, head: Sequence) -> int:
        if head is self._lives.admission.early:
            return self._cache.missing(head)
        return self._cache.needed(head, self._cache.match(head))

    def _makes_way(self, seq: Sequence, head: Sequence) -> bool:
        rank = self._lives.waiting.rank
        if seq is self._lives.admission.early:
            return rank(head) < rank(seq)
        if self._policy == "lpm":
            return False
        priority, other = (s.request.options.priority for s in (head, seq))
        if self._policy == "priority" and other != priority:
            return other > priority
        # A newcomer that waited for others to compute its beginning was passed by.
        passed_by = not head.num_preemptions and not self._fair_users
        return passed_by and rank(head) < rank(seq)

    def extend(self, seq: Sequence, start: int, count: int) -> bool:
        """Pages for the next positions, at the cost of others; False: not in this step."""
        while not self._cache.extend(seq, start, start + count):
            if seq is self._lives.admission.early:
                return False  # it waits, as if it had not begun
            if self._lives.pages_coming > self.num_promised:
                self.num_promised += 1
                return False
            victim = self._victim(seq)
            self._lives.preempt(victim)
            if victim is seq:
                return False
        return True

    def _victim(self, seq: Sequence) -> Sequence:
        """Who makes room for `seq`: of the least priority, and of these what began early, then
        what loses least; or itself."""
        rank, early = self._lives.waiting.rank, self._lives.admission.early
        later = [s for s in self._lives.running if rank(s) >= rank(seq)]
        least = max(rank(s)[0] for s in later)
        if early is not None and early is not seq and rank(early)[0] >= least:
            return early
        return min(
            (s for s in later if rank(s)[0] == least and (s is not seq or len(later) == 1)),
            key=lambda s: (s.num_computed, -s.arrival),
            default=seq,
        )
