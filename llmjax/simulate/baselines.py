"""What paging and continuous batching are compared with; no part of the engine.

Both get the same device, memory and limits, and are treated well: they pad no step to a bucket,
static batching knows how long its requests will get, and no reservation is lost to gaps between
others. What they keep of their own kind is how memory is promised and when a request may begin.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .device import Work
from .outcome import LIMITS, Outcome, Record, Timeline
from .replica import Setup
from .traces import Arrival


class _Server:
    """What both have in common: one replica's memory, a queue and a clock."""

    def __init__(self, name: str, setup: Setup, arrivals: Sequence[Arrival]):
        layout, pages, self.max_model_len = setup.size_memory()
        self.machine, self.config = setup.machine, setup.scheduler
        self.capacity = pages * layout.block_size // layout.num_groups
        self.clock = 0.0
        self.outcome = Outcome(name, [Record(a) for a in arrivals], array("d"), [])
        self.timeline = Timeline(self.capacity)
        self.outcome.timelines.append(self.timeline)
        self.queue: deque[Record] = deque()
        for record in self.outcome.records:
            if record.arrival.input_len + record.arrival.output_len > self.max_model_len:
                record.refused = "too long"
            else:
                self.queue.append(record)
        self._arrivals = [record.arrival.time for record in self.queue]

    @property
    def head(self) -> Record | None:
        """The request that waits first, if one does."""
        return self.queue[0] if self.queue and self.queue[0].arrival.time <= self.clock else None

    def step(self, work: Work, *, reserved: int, stored: int, running: int) -> None:
        """Runs one step."""
        seconds = self.machine.seconds(work)
        waiting = bisect_right(self._arrivals, self.clock) - (len(self._arrivals) - len(self.queue))
        limit = "sequences" if running >= self.config.max_num_seqs else "pages"
        self.timeline.add(
            self.clock,
            seconds,
            used=reserved / self.capacity,
            stored=stored,
            running=running,
            waiting=waiting,
            limit=LIMITS.index(limit if waiting else "none"),
        )
        self.clock += seconds

    def token(self, record: Record) -> None:
        """A request's next token has come."""
        if record.tokens:
            self.outcome.gaps.append(self.clock - record.last)
        else:
            record.first = self.clock
        record.last = self.clock
        record.tokens += 1


def static_batching(setup: Setup, arrivals: Sequence[Arrival]) -> Outcome:
    """A batch of what waits runs until its longest ends, all padded to the longest.

    Memory is reserved for each at the longest prompt and the longest output of the batch.
    """
    server = _Server("static batching", setup, arrivals)
    while server.queue:
        server.clock = max(server.clock, server.queue[0].arrival.time)
        batch: list[Record] = []
        longest_in = longest_out = 0
        while (head := server.head) and len(batch) < setup.scheduler.max_num_seqs:
            lengths = head.arrival.input_len, head.arrival.output_len
            prompt, output = max(longest_in, lengths[0]), max(longest_out, lengths[1])
            if (len(batch) + 1) * (prompt + output) > server.capacity:
                break
            longest_in, longest_out = prompt, output
            batch.append(server.queue.popleft())
        _run_batch(server, batch, longest_in, longest_out)
    return server.outcome


def _run_batch(server: _Server, batch: list[Record], prompt: int, output: int) -> None:
    size, windows = len(batch), server.machine.windows
    reserved = size * (prompt + output)
    together = max(1, server.config.max_num_batched_tokens // prompt)
    stored = 0
    for first in range(0, size, together):
        part = batch[first : first + together]
        stored += sum(record.arrival.input_len for record in part)
        rows = len(part) * prompt
        work = Work.of([(0, prompt)] * len(part), windows, rows=rows, sampled=len(part))
        server.step(work, reserved=reserved, stored=stored, running=size)
        for record in part:
            server.token(record)
    for done in range(1, output):
        live = [record for record in batch if record.arrival.output_len > done]
        one = Work.of([(prompt + done - 1, 1)], windows, rows=1, sampled=1)
        work = Work(size, size, size * one.seen, size * one.pairs)
        stored = sum(record.arrival.input_len + done for record in live)
        server.step(work, reserved=reserved, stored=stored, running=size)
        for record in live:
            server.token(record)


@dataclass(slots=True)
class _Running:
    record: Record
    reserved: int
    computed: int = 0


def power_of_two(length: int) -> int:
    """The least power of two that is no less."""
    return 1 << (length - 1).bit_length()


def contiguous(setup: Setup, arrivals: Sequence[Arrival], *, bound: str) -> Outcome:
    """Continuous batching where each request reserves one piece of memory for all it may need.

    Args:
        bound: "max": `max_model_len` tokens, as where nothing is known of the output; "pow2":
            the least power of two that holds prompt and output, as if that were foreseen
            (Orca's Max and Pow2 in Kwon et al., 2023).
    """
    server = _Server(f"contiguous, {bound}", setup, arrivals)
    most = server.max_model_len

    def reserve(arrival: Arrival) -> int:
        needed = power_of_two(arrival.input_len + arrival.output_len)
        return most if bound == "max" else min(most, needed)

    running: list[_Running] = []
    reserved = 0
    while server.queue or running:
        if not running:
            server.clock = max(server.clock, server.queue[0].arrival.time)
        while (head := server.head) and len(running) < setup.scheduler.max_num_seqs:
            needed = reserve(head.arrival)
            if reserved + needed > server.capacity:
                break
            reserved += needed
            running.append(_Running(server.queue.popleft(), needed))
        _iterate(server, running, reserved)
        ended = [r for r in running if r.record.tokens == r.record.arrival.output_len]
        reserved -= sum(r.reserved for r in ended)
        running = [r for r in running if r.record.tokens < r.record.arrival.output_len]
    return server.outcome


def _iterate(server: _Server, running: list[_Running], reserved: int) -> None:
    """One step: a token of each that decodes, and prompts as far as the engine's limits allow."""
    config = server.config
    decodes = sum(r.record.tokens > 0 for r in running)
    room = config.max_num_batched_tokens - decodes
    most = room
    if config.enable_chunked_prefill:
        most = config.prefill_chunk_size
        room = min(room, most) if decodes else room
    chunks: list[tuple[int, int]] = []
    sampling: list[Record] = []
    for r in running:
        prompt = r.record.arrival.input_len
        count = 1
        if not r.record.tokens:
            count = min(prompt - r.computed, room, most)
            if not config.enable_chunked_prefill and count < prompt and chunks:
                count = room = 0
            elif not config.enable_chunked_prefill:
                count = prompt
            room = max(0, room - count)
        if not count:
            continue
        chunks.append((r.computed, count))
        r.computed += count
        if r.computed >= prompt:
            sampling.append(r.record)
    rows = sum(count for _, count in chunks)
    work = Work.of(chunks, server.machine.windows, rows=rows, sampled=len(sampling))
    stored = sum(r.computed for r in running)
    server.step(work, reserved=reserved, stored=stored, running=len(running))
    for record in sampling:
        server.token(record)


def run_baseline(name: str, setup: Setup, arrivals: Sequence[Arrival]) -> Outcome:
    """Serves all arrivals the way that `name`, one of `BASELINES`, stands for."""
    if name == "static":
        return static_batching(setup, arrivals)
    return contiguous(setup, arrivals, bound=name)
