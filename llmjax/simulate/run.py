"""Replicas behind a router, and how many of them a load needs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from math import ceil

from ..errors import ConfigError
from . import ROUTINGS
from .outcome import Outcome
from .replica import Replica, Setup
from .traces import Arrival

MOST_REPLICAS = 1024


def simulate(
    setup: Setup,
    arrivals: Sequence[Arrival],
    *,
    replicas: int = 1,
    routing: str = "least-loaded",
) -> Outcome:
    """Serves all arrivals to their ends.

    Args:
        arrivals: in order of time.
        routing: "round-robin", or "least-loaded": to the replica with fewest requests, the
            first of these.

    Raises:
        ConfigError: a value is not allowed, or memory does not hold what is asked for.
    """
    if routing not in ROUTINGS:
        raise ConfigError(f"routing is {routing!r}, allowed: {', '.join(ROUTINGS)}")
    if not 1 <= replicas <= MOST_REPLICAS:
        raise ConfigError(f"replicas is {replicas}, allowed: 1 to {MOST_REPLICAS}")
    all_replicas = [Replica(setup) for _ in range(replicas)]
    turns = cycle(all_replicas)
    for arrival in arrivals:
        if routing == "round-robin":
            chosen = next(turns)
            chosen.run(arrival.time)
        else:
            for replica in all_replicas:
                replica.run(arrival.time)
            chosen = min(all_replicas, key=lambda replica: replica.load)
        chosen.submit(arrival)
    counts: Counter[str] = Counter()
    gaps = array("d")
    for replica in all_replicas:
        replica.run()
        replica.scheduler.check_balance()
        counts.update(replica.counts())
        gaps += replica.gaps
    return Outcome(
        name="llmjax",
        records=[record for replica in all_replicas for record in replica.records],
        gaps=gaps,
        timelines=[replica.timeline for replica in all_replicas],
        counts=dict(counts),
        host_seconds=sum(replica.host_seconds for replica in all_replicas),
    )


def p99_ttft(outcome: Outcome) -> float:
    """Seconds; a request that found the queue full never gets its first token."""
    kept = [record for record in outcome.records if record.refused != "too long"]
    times = [float("inf") if record.refused else record.ttft for record in kept]
    return sorted(times)[ceil(0.99 * len(times)) - 1] if times else float("inf")


def capacity(
    setup: Setup, arrivals: Sequence[Arrival], *, p99_ttft_s: float, routing: str = "least-loaded"
) -> dict[int, Outcome]:
    """Finds the fewest replicas whose p99 time to first token stays within `p99_ttft_s`.

    Doubles their number until it does, then halves the gap.

    Returns:
        What each number that was tried came to, in order of the number; the answer is the
        least that keeps within.

    Raises:
        ConfigError: a request alone takes longer, or more than `MOST_REPLICAS` are needed.
    """
    tried: dict[int, Outcome] = {}

    def holds(replicas: int) -> bool:
        tried[replicas] = simulate(setup, arrivals, replicas=replicas, routing=routing)
        return p99_ttft(tried[replicas]) <= p99_ttft_s

    most = 1
    while not holds(most):
        enough = min(len(arrivals), MOST_REPLICAS)
        if most >= enough:
            raise ConfigError(
                f"p99_ttft_ms is {1e3 * p99_ttft_s:g}, and {most} replicas come to "
                f"{1e3 * p99_ttft(tried[most]):.0f}: no number of them keeps it"
            )
        most = min(2 * most, enough)
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if holds(middle) else (middle, most)
    return dict(sorted(tried.items()))
