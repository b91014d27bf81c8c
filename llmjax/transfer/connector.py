"""The two ends of what carries prompts to a prefill worker, and pages back from it.

A `Connector` is one worker as the engine that decodes sees it; a `Guest` is one such engine as
the worker sees it. Whatever lies between them (nothing, shared memory, a network), both ends
promise the same.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import PrefillMismatchError

PROTOCOL = 1
PART_PAGES = 16
"""Pages that travel together at most."""


@dataclass(frozen=True)
class Job:
    """A prompt to compute.

    Attributes:
        id: the sender's own number for it.
        start: blocks of it whose pages the sender has, and does not want.
        salt: `RequestOptions.cache_salt`.
    """

    id: int
    token_ids: Sequence[int]
    start: int = 0
    salt: str | None = None


class Cancel(NamedTuple):
    """The result of a job is of no use any more."""

    job_id: int


class Place(NamedTuple):
    """Where in a prompt a page belongs: the group of layers, and the block of tokens."""

    group: int
    block: int


class Part(NamedTuple):
    """Some pages of a prompt.

    Attributes:
        rows: for each array of a page, the contents of these pages, [places or more, *shape].
    """

    places: list[Place]
    rows: list[Any]


@dataclass(frozen=True)
class Pages:
    """What became of a job: all pages that going on behind its last full page takes.

    Attributes:
        num_cached: tokens of the prompt that the worker had.
    """

    job_id: int
    parts: list[Part]
    num_cached: int = 0


class Failure(NamedTuple):
    """A job that came to nothing."""

    job_id: int
    reason: str


Result = Pages | Failure


@dataclass(frozen=True)
class Terms:
    """What two engines must agree upon before pages of one are of use to the other.

    Attributes:
        values: by what people call them, as JSON has them.
        arrays: shape and dtype of each array of a page.
        most_tokens: of a prompt; here the two may differ.
    """

    values: Mapping[str, Any]
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]
    most_tokens: int

    @property
    def page_bytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.arrays)

    def check(self, theirs: Mapping[str, Any], who: str) -> None:
        """Compares the terms of `who` with these.

        Raises:
            PrefillMismatchError: they differ; names the first difference and both values.
        """
        for name in dict.fromkeys((*self.values, *theirs)):
            ours, other = self.values.get(name), theirs.get(name)
            if ours != other:
                raise PrefillMismatchError(who, name, ours, other)


class Connector(ABC):
    """One prefill worker. Its methods return at once, and any thread may call them.

    Each job that was sent has one result, but for cancelled ones, which may have none.

    Args:
        on_news: called, by any thread, when there is something to receive.
    """

    def __init__(self, address: str, on_news: Callable[[], None]):
        self.address = address
        self._on_news = on_news
        self._lock = threading.Lock()
        self._open: dict[int, Job] = {}
        self._results: deque[Result] = deque()

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether the worker takes jobs."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Of a prompt that the worker takes."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection."""

    @abstractmethod
    def _carry(self, message: Job | Cancel) -> bool:
        """Brings a message on its way; False where there is none."""

    def send(self, job: Job) -> None:
        with self._lock:
            self._open[job.id] = job
        if not self._carry(job):
            self._deliver(Failure(job.id, "the worker is gone"))

    def cancel(self, job_id: int) -> None:
        with self._lock:
            is_open = self._open.pop(job_id, None) is not None
        if is_open:
            self._carry(Cancel(job_id))

    def receive(self) -> list[Result]:
        """The results that have come since the last call."""
        with self._lock:
            results, self._results = list(self._results), deque()
        return results

    def _deliver(self, result: Result) -> None:
        """Takes in the result of a job; nobody waits for that of a cancelled one."""
        with self._lock:
            if self._open.pop(result.job_id, None) is None:
                return
            self._results.append(result)
        self._on_news()

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            jobs = list(self._open)
        for job_id in jobs:
            self._deliver(Failure(job_id, reason))


class Guest(Protocol):
    """An engine that brings its prompts."""

    def reply(self, result: Result) -> None:
        """Sends a result and returns at once; nothing happens where the guest has gone."""


Message = Job | Cancel | None
"""What a guest says; None: it has gone."""

Deliver = Callable[[Guest, Message], None]
"""Where the messages of guests go, by any thread."""
