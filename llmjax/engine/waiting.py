"""Sequences that wait to run, and the order in which they are to begin.

Of the lowest number of priority first, where the policy goes by it. Of these first those that
have run before, then, where users get fair shares, as `fairness` says. Of each user the first
that came, or, where the policy is "lpm", that of which the cache has most (longest prefix
match), among the `MOST_LOOKED_AT` that have waited longest. But one that `MOST_OVERTAKEN` later
ones of the same user and priority have overtaken goes before all of these that were not. Those
that are held stay in the queue, and are passed by.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice

from ..request import Sequence
from .deadlines import QueuePace
from .fairness import Shares, User

MOST_LOOKED_AT = 64
MOST_OVERTAKEN = 64

Rank = tuple[int, float, int]


class _Class:
    """The waiting of one priority."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, Sequence]] = []
        # Of each user in order of arrival.
        self.new: dict[User, dict[Sequence, None]] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return chain((seq for _, seq in self.begun), *self.new.values())


class WaitingQueue:
    """Waiting sequences; one that was preempted comes back before those that never ran.

    Args:
        by_priority: a request's priority comes before all else; lower goes first.
        longest_first: the policy "lpm".
        fair: users get fair shares.
    """

    def __init__(self, *, by_priority: bool, longest_first: bool = False, fair: bool = False):
        self._by_priority = by_priority
        self._longest_first = longest_first
        self._shares = Shares() if fair else None
        self._others: list[WaitingQueue] = []
        self._classes: dict[int, _Class] = {}
        self._of_request: Counter[str] = Counter()
        self._overtaken: Counter[Sequence] = Counter()
        self._turns = 0
        self._size = 0
        self.pace = QueuePace()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._classes.values())

    @property
    def num_requests(self) -> int:
        return len(self._of_request)

    @property
    def oldest(self) -> Sequence:
        """Of the lowest rank."""
        waiting = self._classes[min(self._classes)]
        if waiting.begun:
            return waiting.begun[0][1]
        return min((next(iter(new)) for new in waiting.new.values()), key=self.rank)

    def rank(self, seq: Sequence) -> Rank:
        """Running ones of a lower rank go first: by priority, then in the order in which they
        began. Those that never began come last, in order of arrival."""
        return (self._priority(seq), seq.turn or math.inf, seq.arrival)

    def join(self, seq: Sequence) -> None:
        """Adds a sequence that has just come."""
        if self._shares is not None:
            self._shares.join(self._user(seq))
        self.add(seq)

    def leave(self, seq: Sequence) -> None:
        """A sequence that joined has ended and is not in the queue."""
        if self._shares is not None:
            self._shares.leave(self._user(seq))

    def add(self, seq: Sequence) -> None:
        waiting = self._classes.setdefault(self._priority(seq), _Class())
        if seq.turn:
            insort(waiting.begun, (seq.turn, seq), key=lambda at: at[0])
        else:
            waiting.new.setdefault(self._user(seq), {})[seq] = None
        self._of_request[seq.request.id] += 1
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        priority, user = self._priority(seq), self._user(seq)
        waiting = self._classes[priority]
        if seq.turn:
            waiting.begun.remove((seq.turn, seq))
        else:
            del waiting.new[user][seq]
            if not waiting.new[user]:
                del waiting.new[user]
        if not (waiting.begun or waiting.new):
            del self._classes[priority]
        self._overtaken.pop(seq, None)
        self._of_request[seq.request.id] -= 1
        if not self._of_request[seq.request.id]:
            del self._of_request[seq.request.id]
        self._size -= 1

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Takes a sequence out that begins to run, or runs again.

        Args:
            num_cached: its tokens that need not be computed.
        """
        if not seq.turn:
            waiting, user = self._classes[self._priority(seq)].new, self._user(seq)
            if self._shares is not None:
                elsewhere = self._elsewhere(self._priority(seq))
                self._shares.begin(user, seq.prompt_len - num_cached, waiting, elsewhere)
            if self._longest_first:
                self._overtaken.update(_before(seq, waiting[user]))
        self.remove(seq)
        if not seq.turn:
            self._turns += 1
            seq.turn = self._turns

    def charge(self, seq: Sequence, tokens: int) -> None:
        """A sequence has generated so much."""
        if self._shares is not None and (self._size or any(self._others)):
            self._shares.charge(self._user(seq), tokens)

    def in_order(self, cached: Callable[[Sequence], int]) -> Iterator[Sequence]:
        """Up to `MOST_LOOKED_AT` in the order in which they are to begin, as the queue is now.

        Args:
            cached: how many tokens of a sequence the cache has.
        """
        orders = (self._order(priority, cached) for priority in sorted(self._classes))
        return islice(chain.from_iterable(orders), MOST_LOOKED_AT)

    def share(self, others: list[WaitingQueue]) -> None:
        """Users' shares become those of these queues, too; of other engines, and all empty."""
        self._others = others
        for other in others:
            other._shares = self._shares
            other._others = [self, *(queue for queue in others if queue is not other)]

    def _elsewhere(self, priority: int) -> set[User]:
        """Users with requests of this priority that wait at other engines."""
        classes = (queue._classes.get(priority) for queue in self._others)
        return {user for waiting in classes if waiting is not None for user in waiting.new}

    def _order(self, priority: int, cached: Callable[[Sequence], int]) -> Iterator[Sequence]:
        waiting = self._classes[priority]
        yield from [seq for _, seq in waiting.begun]
        shares = self._shares.copy() if self._shares is not None else None
        elsewhere = self._elsewhere(priority)
        queues = {user: self._queue(new, cached) for user, new in waiting.new.items()}
        while queues:
            user = shares.next(queues) if shares is not None else next(iter(queues))
            seq = next(queues[user], None)
            if seq is None:
                del queues[user]
                continue
            if shares is not None:
                shares.begin(user, seq.prompt_len, queues, elsewhere)
            yield seq

    def _queue(
        self, new: dict[Sequence, None], cached: Callable[[Sequence], int]
    ) -> Iterator[Sequence]:
        """One user's, the next to begin first."""
        able = ((seq, None) for seq in new if not seq.is_held)
        left = dict(islice(able, MOST_LOOKED_AT))
        if not self._longest_first:
            yield from left
            return
        sizes = {seq: cached(seq) for seq in left}
        overtaken = Counter({seq: self._overtaken[seq] for seq in left})
        while left:
            late = (seq for seq in left if overtaken[seq] >= MOST_OVERTAKEN)
            seq = next(late, None) or max(left, key=sizes.__getitem__)
            overtaken.update(_before(seq, left))
            del left[seq]
            yield seq

    def _priority(self, seq: Sequence) -> int:
        return seq.request.options.priority if self._by_priority else 0

    def _user(self, seq: Sequence) -> User:
        return (seq.request.options.user or "") if self._shares is not None else ""


def _before(seq: Sequence, queue: dict[Sequence, None]) -> list[Sequence]:
    """Those that came before it."""
    before = []
    for other in queue:
        if other is seq:
            break
        before.append(other)
    return before
