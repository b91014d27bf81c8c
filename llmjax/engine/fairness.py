"""Whose request begins next, where users are to get fair shares of the machine.

Deficit round robin over tokens. Users with waiting requests stand in a ring and are visited in
turn. A visit adds `QUANTUM` tokens to a user's credit, and his requests begin for as long as it
is above 0. Prompt tokens that are not cached cost their number as a request begins, output
tokens as they come, but these only while anybody waits: what nobody else wanted costs nothing.
A credit below 0 takes several visits to make good.

Several engines may keep one account, where each has a queue of its own. Who alone waits at one of
them begins there whatever his credit, and goes into debt for as long as anybody who waits only
elsewhere has credit left.

The first request of a user of whom nothing runs or waits goes before the ring, after at most
one request of the ring and one for each who came so before him.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container

QUANTUM = 64
"""Small beside a request: users take turns often, those of large requests sit out more visits."""

User = str
"""What a request says of its user; those that say nothing are of one user, the empty name."""


class Shares:
    """The users of whom anything runs or waits."""

    def __init__(self) -> None:
        self._live: Counter[User] = Counter()
        self._new: dict[User, None] = {}
        # In order of the ring; who is visited now went to its end as the visit began.
        self._credit: dict[User, int] = {}
        self._visited: User | None = None
        self._passed_over = False

    def copy(self) -> Shares:
        """To try out who would come after whom."""
        other = Shares()
        other._new, other._credit = dict(self._new), dict(self._credit)
        other._visited, other._passed_over = self._visited, self._passed_over
        return other

    def join(self, user: User) -> None:
        """A sequence of his has arrived."""
        if not self._live[user]:
            self._new[user] = None
        self._live[user] += 1

    def leave(self, user: User) -> None:
        """A sequence of his has ended."""
        self._live[user] -= 1
        if not self._live[user]:
            del self._live[user]
            self._new.pop(user, None)
            self._credit.pop(user, None)

    def next(self, waiting: Container[User]) -> User:
        """Who is to begin a request, of those who have any waiting."""
        ring = [user for user in self._credit if user in waiting]
        new = [user for user in self._new if user in waiting]
        if new and not (ring and self._passed_over):
            return new[0]
        return min(ring, key=self._visits)  # of as many visits the first in the ring

    def begin(
        self,
        user: User,
        tokens: int,
        waiting: Container[User],
        elsewhere: Collection[User] = (),
    ) -> None:
        """A request of his begins, which costs so many tokens.

        Args:
            waiting: who had requests to begin in his stead.
            elsewhere: who has some, but at other engines.
        """
        is_new = user in self._new
        self._passed_over = is_new and any(other in waiting for other in self._credit)
        if is_new:
            del self._new[user]
            self._credit[user] = 0
        elif visits := self._visits(user):
            others = [other for other in elsewhere if other not in waiting]
            if not any(self._credit.get(other, 1) > 0 for other in others):
                self._visit(user, visits, {*others, *(u for u in self._credit if u in waiting)})
        self._credit[user] -= tokens

    def charge(self, user: User, tokens: int) -> None:
        if user in self._credit:
            self._credit[user] -= tokens

    def _visits(self, user: User) -> int:
        """How many more visits he needs to begin a request."""
        credit = self._credit[user]
        if credit > 0:
            return 0 if user == self._visited else 1
        return -(-(1 - credit) // QUANTUM)

    def _visit(self, user: User, visits: int, waiting: Container[User]) -> None:
        """Goes around the ring until `user` is visited for the last of so many times."""
        ring = list(self._credit)
        at = ring.index(user)
        for i, other in enumerate(ring):
            if other in waiting or other == user:
                self._credit[other] += (visits if i <= at else visits - 1) * QUANTUM
        self._credit = {u: self._credit[u] for u in (*ring[at + 1 :], *ring[: at + 1])}
        self._visited = user
