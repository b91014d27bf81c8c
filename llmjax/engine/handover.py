"""Requests whose prompts a prefill worker computes: held back until their pages are there.

A request is held where enough of its prompt is not cached and a worker is up. It waits in the
scheduler's queue like any other, where deadlines and aborts reach it, but cannot begin. When its
pages have come it begins with them; where they do not come (the worker is lost, late, or
refuses), it begins without, and is computed here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..cache.brought import At, bring, wanted_of
from ..cache.manager import KVCache
from ..config import PrefillConfig
from ..metrics import Metrics
from ..request import Sequence as Choice
from ..request import Status
from ..transfer.connector import Connector, Failure, Job, Pages, Result

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Held:
    """One request.

    Attributes:
        choices: its sequences.
        num_pages: that are to come.
        worker: who was asked for them; None: nobody yet.
        pages: what came, until it is put to its place.
    """

    job: Job
    choices: list[Choice]
    num_pages: int
    since: float
    worker: Connector | None = None
    pages: Pages | None = None

    @property
    def live(self) -> list[Choice]:
        return [seq for seq in self.choices if seq.status is not Status.FINISHED]


@dataclass(eq=False)
class Handover:
    """Asks workers for pages, the least loaded first. One thread at a time may use it.

    No more pages are on their way than host memory has slots.

    Args:
        cache: with host memory.
        news: set by connectors as something has come.

    Attributes:
        workers: one connector each.
    """

    cache: KVCache
    workers: Sequence[Connector]
    config: PrefillConfig
    metrics: Metrics
    news: threading.Event
    page_bytes: int
    clock: Callable[[], float] = time.monotonic
    _held: dict[int, _Held] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=count)
    _silenced: set[str] = field(default_factory=set)
    _late: set[str] = field(default_factory=set)

    @property
    def num_held(self) -> int:
        """Requests."""
        return len(self._held)

    @property
    def num_up(self) -> int:
        """Workers."""
        return sum(worker.is_up for worker in self.workers)

    def consider(self, choices: list[Choice]) -> None:
        """Holds a request that has just been queued, where a worker is to compute its prompt."""
        first = choices[0]
        request, layout = first.request, self.cache.layout
        if request.params.prompt_logprobs is not None:
            return  # they come of computing the prompt
        match = self.cache.match(first)
        start = len(match.nodes)
        pages = len(wanted_of(layout, first.prompt_len, start))
        end = (first.prompt_len - 1) // layout.block_size
        computed = (end - start) * layout.block_size
        if not pages or computed < self.config.prefill_min_tokens:
            return
        job = Job(next(self._ids), request.prompt_token_ids, start, request.options.cache_salt)
        if pages > self._num_slots or not self._able(job):
            return
        for seq in choices:
            seq.is_held = True
        self._held[job.id] = _Held(job, choices, pages, self.clock())
        self._ask()

    def poll(self) -> None:
        """Takes in what has come, gives up what is late, and asks for what there is room for."""
        self.news.clear()
        self.drop_ended()
        for worker in self.workers:
            for result in worker.receive():
                self._late.discard(worker.address)
                self._receive(result)
        late = self.clock() - self.config.prefill_timeout
        for held in list(self._held.values()):
            if held.pages is not None and self._bring(held, held.pages):
                self._release(held)
            elif held.since <= late:
                self._cancel(held)
                if held.worker is not None and held.pages is None:
                    self._late.add(held.worker.address)
                self._give_up(held, f"no pages within {self.config.prefill_timeout:g} s")
            elif held.worker is None and not self._able(held.job):
                self._give_up(held, "no worker is up and answers")
        self._ask()

    def drop_ended(self) -> None:
        """Forgets the requests that ended while they were held."""
        for held in list(self._held.values()):
            if not held.live:
                self._cancel(held)
                del self._held[held.job.id]

    def wait(self, seconds: float) -> None:
        """Until something has come, but no longer."""
        if self._held:
            self.news.wait(seconds)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def check_balance(self) -> None:
        """Raises RuntimeError where what is held and what the scheduler has do not agree."""
        for held in self._held.values():
            for seq in held.live:
                if not seq.is_held or seq.status is not Status.WAITING or seq.block_tables:
                    raise RuntimeError(f"{seq.request.id!r} is held, and goes on nevertheless")

    @property
    def _num_slots(self) -> int:
        return self.cache.host.num_slots if self.cache.host is not None else 0

    def _able(self, job: Job) -> list[Connector]:
        """The workers that could take it. One that did not answer has one job at a time, until it
        does: not every request is to wait for it."""
        size, up = len(job.token_ids), [worker for worker in self.workers if worker.is_up]
        ready = [w for w in up if w.address not in self._late or not self._load(w)]
        return [worker for worker in ready if size < worker.most_tokens]

    def _load(self, worker: Connector) -> int:
        """Tokens that it is to compute."""
        asked = (held for held in self._held.values() if held.worker is worker)
        return sum(len(held.job.token_ids) for held in asked if held.pages is None)

    def _ask(self) -> None:
        """Sends jobs, in the order of arrival, while there is room for what comes back."""
        room = self._num_slots - sum(h.num_pages for h in self._held.values() if h.worker)
        for held in self._held.values():
            if held.worker is not None:
                continue
            able = self._able(held.job)
            if held.num_pages > room or not able:
                return
            room -= held.num_pages
            held.worker = min(able, key=self._load)
            self.metrics.prefill_jobs.inc()
            held.worker.send(held.job)

    def _receive(self, result: Result) -> None:
        held = self._held.get(result.job_id)
        if held is None:
            return  # it has been given up
        if isinstance(result, Failure):
            self._give_up(held, result.reason)
        else:
            held.pages = result

    def _bring(self, held: _Held, pages: Pages) -> bool:
        """Puts pages to their place; False where they must wait for it."""
        seq, size = held.live[0], self.cache.layout.block_size
        contents: dict[At, Any] = {
            place: tuple(row[i] for row in part.rows)
            for part in pages.parts
            for i, place in enumerate(part.places)
        }
        if not bring(self.cache, seq, contents):
            return False
        end = (seq.prompt_len - 1) // size * size
        seq.num_brought = max(0, end - max(held.job.start * size, pages.num_cached))
        self.metrics.prefill_pages.inc(len(contents))
        self.metrics.prefill_bytes.inc(len(contents) * self.page_bytes)
        self.metrics.prefill_handover.observe(self.clock() - held.since)
        if held.worker is not None:
            self._silenced.discard(held.worker.address)
        return True

    def _cancel(self, held: _Held) -> None:
        if held.worker is not None:
            held.worker.cancel(held.job.id)

    def _give_up(self, held: _Held, reason: str) -> None:
        """Lets a request be computed here. Of a row of failures the first is told."""
        self.metrics.prefill_failures.inc()
        who = held.worker.address if held.worker is not None else ""
        level = logging.DEBUG if who in self._silenced else logging.WARNING
        self._silenced.add(who)
        log.log(
            level,
            "a prompt of %d tokens is computed here and not by the prefill worker at %s: %s",
            len(held.job.token_ids),
            who or "any address",
            reason,
        )
        self._release(held)

    def _release(self, held: _Held) -> None:
        for seq in held.choices:
            seq.is_held = False
        del self._held[held.job.id]
