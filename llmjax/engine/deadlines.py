"""When requests must have begun to run, and when they must have ended."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator

from ..errors import QueueTimeoutError, RequestTimeoutError
from ..request import Request

MAX_RETRY_AFTER = 60
MOST_BEGINNINGS = 64

Due = tuple[float, str, bool]
"""(moment, request id, whether it must have begun by then; else: have ended)"""


class Deadlines:
    """Asked every step, and looks at the nearest one only.

    Args:
        queue_timeout: seconds that any request may wait to begin, beside its own limit.
    """

    def __init__(self, queue_timeout: float | None):
        self._queue_timeout = queue_timeout
        self._due: list[Due] = []
        self._of: defaultdict[str, list[Due]] = defaultdict(list)

    def __iter__(self) -> Iterator[str]:
        """The requests that have any."""
        return iter(self._of)

    def add(self, request: Request) -> None:
        options = request.options
        waits = [t for t in (self._queue_timeout, options.queue_timeout) if t is not None]
        if waits:
            self._insert((request.arrival_time + min(waits), request.id, True))
        if options.timeout is not None:
            self._insert((request.arrival_time + options.timeout, request.id, False))

    def begun(self, request_id: str) -> None:
        """The request waits no more, or waits again after it has run."""
        self._drop(request_id, [due for due in self._of.get(request_id, ()) if due[2]])

    def remove(self, request_id: str) -> None:
        """The request has ended."""
        self._drop(request_id, list(self._of.get(request_id, ())))

    def next_due(self, now: float) -> tuple[str, bool] | None:
        """A request that is late, and whether it should have begun; None where none is."""
        if not self._due or self._due[0][0] > now:
            return None
        return self._due[0][1:]

    def _insert(self, due: Due) -> None:
        insort(self._due, due)
        self._of[due[1]].append(due)

    def _drop(self, request_id: str, gone: list[Due]) -> None:
        for due in gone:
            del self._due[bisect_left(self._due, due)]
            self._of[request_id].remove(due)
        if not self._of.get(request_id, True):
            del self._of[request_id]


def late(request: Request, now: float, to_begin: bool) -> RequestTimeoutError | QueueTimeoutError:
    """What the client of a late request is told."""
    waited = now - request.arrival_time
    if to_begin:
        return QueueTimeoutError(
            f"the request waited {waited:.1f} s in the queue without its turn (queue_timeout)",
            retry_after=retry_after(waited),
        )
    return RequestTimeoutError(
        f"the request had not ended {waited:.3g} s after its arrival, and its timeout is "
        f"{request.options.timeout:g} s"
    )


def retry_after(seconds: float) -> int:
    """Seconds to tell a client, where it is thought to take so long."""
    return min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER)


class QueuePace:
    """How fast requests leave the queue to run, by the last of them since it was empty."""

    def __init__(self) -> None:
        self._began: deque[float] = deque(maxlen=MOST_BEGINNINGS)

    def begun(self, now: float) -> None:
        self._began.append(now)

    def seconds(self, now: float) -> float | None:
        """That a request takes to pass; None where none has been seen to."""
        if not self._began or now <= self._began[0]:
            return None
        return (now - self._began[0]) / len(self._began)
