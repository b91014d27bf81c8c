"""What a simulation notes: each request's times, and how full the device is at each step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from .traces import Arrival

LIMITS = ("none", "sequences", "pages", "tokens")
"""What the request that waits first waits for: nobody waits, a seat, pages (by the
forecast of them as well), room in a step."""


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        refused: why, where it was; the other fields then mean nothing.
        first, last: when its first and its last token came, in seconds of the simulation.
        tokens: that came.
        cached: tokens of the prompt that the prefix cache had.
    """

    arrival: Arrival
    refused: str | None = None
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    cached: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.arrival.time

    @property
    def e2e(self) -> float:
        return self.last - self.arrival.time

    @property
    def mean_gap(self) -> float:
        """Seconds between its tokens."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Timeline:
    """A replica's steps, a value each.

    Attributes:
        capacity: tokens that its pages hold.
        start, seconds: when the step begins and how long it takes.
        used: share of memory for keys and values that is taken.
        stored: tokens whose keys and values are in memory that is taken.
        running, waiting: sequences.
        limit: index into `LIMITS`.
    """

    capacity: int
    start: array[float] = field(default_factory=_doubles)
    seconds: array[float] = field(default_factory=_doubles)
    used: array[float] = field(default_factory=_doubles)
    stored: array[float] = field(default_factory=_doubles)
    running: array[float] = field(default_factory=_doubles)
    waiting: array[float] = field(default_factory=_doubles)
    limit: array[float] = field(default_factory=_doubles)

    def add(
        self,
        start: float,
        seconds: float,
        *,
        used: float,
        stored: int,
        running: int,
        waiting: int,
        limit: int = 0,
    ) -> None:
        self.start.append(start)
        self.seconds.append(seconds)
        self.used.append(used)
        self.stored.append(stored)
        self.running.append(running)
        self.waiting.append(waiting)
        self.limit.append(limit)


@dataclass
class Outcome:
    """What one way to serve made of a trace.

    Attributes:
        gaps: seconds between tokens of all requests.
        counts: sums over the replicas, by name; see `Replica.counts`.
        host_seconds: processor time that scheduling took.
    """

    name: str
    records: list[Record]
    gaps: array[float]
    timelines: list[Timeline]
    counts: dict[str, int] = field(default_factory=dict)
    host_seconds: float = 0.0
