"""An engine without a device: scheduler, memory manager and buckets, on a virtual clock."""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from ..cache.block_pool import BlockPool
from ..cache.host_pool import HostPool, MoveCosts
from ..cache.layout import KVLayout
from ..cache.manager import KVCache
from ..config import CacheConfig, CompileConfig, SchedulerConfig
from ..engine.buckets import Buckets
from ..engine.context import fit_context, most_chunk
from ..engine.plan import Chunk, Plan
from ..engine.scheduler import Scheduler
from ..errors import ConfigError, InvalidRequestError, QueueFullError
from ..request import Request, SamplingParams, Sequence, SequenceDelta, Status
from .device import Machine
from .outcome import LIMITS, Record, Timeline
from .traces import Arrival

OUTPUT, EOS = (1 << 20) - 1, (1 << 20) - 2
"""The token that every sequence generates, and the one that ends it; no prompt has them."""


@dataclass(frozen=True)
class Setup:
    """How each replica is configured.

    Attributes:
        max_model_len: by default the model's own, lowered to what the memory holds.
        known_lengths: requests ask for as many tokens as they get (`max_tokens` with
            `ignore_eos`), so that the scheduler can count on it; otherwise they may go on to
            the end of the context, and end by themselves.
    """

    machine: Machine
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    max_model_len: int | None = None
    known_lengths: bool = False

    def size_memory(self) -> tuple[KVLayout, int, int]:
        """How layers share pages, the number of pages, and the most tokens of a sequence.

        Raises:
            ConfigError: the memory does not hold what is asked for.
        """
        if self.cache.kv_eviction is not None:
            raise ConfigError(
                f"kv_eviction is {self.cache.kv_eviction!r}, allowed in a simulation: none"
            )
        asked, own = self.max_model_len, self.machine.shape.max_position
        if asked is not None and not 2 <= asked <= own:
            raise ConfigError(f"max_model_len is {asked}, the model allows 2 to {own}")
        longest = asked or own
        windows, size = self.machine.shape.windows, self.cache.block_size
        layout = KVLayout.of(windows, block_size=size, max_model_len=longest)
        pages = self.machine.count_pages(self.cache, self.scheduler, layout, max_model_len=longest)
        return layout, pages, fit_context(asked, own, pages, layout, self.scheduler)


class Replica:
    """Steps as `Engine.step` does: step n + 1 is planned and sent off before step n is read.

    Attributes:
        clock: seconds, as its host sees them.
        records: of what was submitted, in order.
        gaps: seconds between tokens.
        host_seconds: processor time that scheduling took.
    """

    def __init__(self, setup: Setup):
        layout, pages, self.max_model_len = setup.size_memory()
        self._machine, self._known_lengths = setup.machine, setup.known_lengths
        self._page_bytes = setup.machine.page_bytes(layout)
        move = setup.machine.host_seconds(self._page_bytes)
        costs = MoveCosts(save=move, load=move, compute=setup.machine.token_seconds())
        cache, scheduler = setup.cache, setup.scheduler
        self.host = HostPool.sized(
            cache.swap_space, cache.kv_offloading_size, self._page_bytes, costs
        )
        self.cache = KVCache(
            BlockPool(pages),
            layout,
            enable_prefix_caching=cache.enable_prefix_caching,
            host=self.host,
            chunk=most_chunk(scheduler, self.max_model_len),
        )
        buckets = Buckets(
            scheduler,
            setup.compile,
            max_model_len=self.max_model_len,
            block_size=cache.block_size,
        )
        for bucket in buckets.all:
            buckets.mark_ready(bucket)
        self.scheduler = Scheduler(
            scheduler,
            buckets,
            self.cache,
            max_model_len=self.max_model_len,
            clock=lambda: self.clock,
        )
        self.clock = 0.0
        self.records: list[Record] = []
        self.gaps = array("d")
        self.timeline = Timeline(pages * cache.block_size // layout.num_groups)
        self.host_seconds = 0.0
        self._device_free = 0.0
        self._in_flight: deque[tuple[Plan, float, float]] = deque()
        self._live: dict[str, tuple[Sequence, Record]] = {}
        self._recomputed = self._restored = self._steps = 0
        self._reached: dict[Sequence, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def submit(self, arrival: Arrival) -> None:
        """Queues a request, which may be refused."""
        if not self.has_work:
            self.clock = max(self.clock, arrival.time)
        record = Record(arrival)
        self.records.append(record)
        if arrival.input_len + arrival.output_len > self.max_model_len:
            record.refused = "too long"
            return
        most = arrival.output_len if self._known_lengths else None
        params = SamplingParams(max_tokens=most, ignore_eos=self._known_lengths)
        prompt = arrival.prompt()
        request = Request(
            str(arrival.index), prompt, params, frozenset([EOS]), arrival_time=arrival.time
        )
        seq = Sequence(request, 0, 0, list(prompt))
        try:
            self.scheduler.add(seq)
        except InvalidRequestError:
            record.refused = "too long"
        except QueueFullError:
            record.refused = "queue full"
        else:
            self._live[request.id] = (seq, record)

    def run(self, until: float | None = None) -> None:
        """Goes on until its clock has passed `until`, or it has nothing to do."""
        while self.has_work and (until is None or self.clock < until):
            self.step()

    def step(self) -> None:
        """Sends off the next step if there is one, and reads the one before it."""
        began = time.process_time()
        expired = self.scheduler.expire()
        plan = self.scheduler.schedule()
        self.host_seconds += time.process_time() - began
        for delta in expired:
            seq, record = self._live.pop(delta.request_id)
            self._reached.pop(seq, None)
            record.refused = "late"
        if plan is not None:
            start = max(self.clock, self._device_free)
            seconds = self._machine.step_seconds(plan, self._page_bytes)
            self._device_free = start + seconds
            self._in_flight.append((plan, seconds, self._device_free))
            self._observe(plan, start, seconds)
        if not self._in_flight:
            if self.load:
                raise RuntimeError(f"{self.load} requests are left, and nothing goes on")
            return
        if plan is not None and len(self._in_flight) == 1:
            return
        plan, seconds, done = self._in_flight.popleft()
        self.clock = max(self.clock, done)
        tokens = [self._tokens(chunk) for chunk in plan.chunks]
        began = time.process_time()
        if decodes := plan.num_decodes:
            self.scheduler.pace.observe(
                plan.num_tokens - decodes, decodes, seconds / plan.num_steps
            )
        deltas = self.scheduler.commit(plan, tokens)
        self.host_seconds += time.process_time() - began
        self._receive(deltas)

    def _tokens(self, chunk: Chunk) -> list[int]:
        """What the device samples: an end where the trace has it."""
        seq, record = self._live.get(chunk.seq.request.id, (None, None))
        if seq is None or record is None:
            return [OUTPUT] * chunk.samples  # it has ended, and nobody reads this
        end = chunk.start + chunk.count + 1
        last = seq.prompt_len + record.arrival.output_len
        return [EOS if at == last else OUTPUT for at in range(end - chunk.samples + 1, end + 1)]

    def _receive(self, deltas: list[SequenceDelta]) -> None:
        now = self.clock
        for delta in deltas:
            seq, record = self._live[delta.request_id]
            if record.tokens:
                self.gaps.append(now - record.last)
            else:
                record.first, record.cached = now, delta.num_cached_tokens
            record.last = now
            record.tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                del self._live[delta.request_id]
                self._reached.pop(seq, None)

    def _observe(self, plan: Plan, start: float, seconds: float) -> None:
        self._steps += 1
        for chunk in plan.admitted:
            if chunk.seq.num_preemptions:
                self._recomputed += max(0, self._reached.get(chunk.seq, 0) - chunk.start)
                self._restored += chunk.start
        for chunk in plan.chunks:
            end = chunk.start + chunk.count
            self._reached[chunk.seq] = max(end, self._reached.get(chunk.seq, 0))
        cache = self.cache
        size, used = cache.layout.block_size, cache.num_used
        empty = sum(
            max(0, len(table) * size - seq.num_computed)
            for seq in cache.ways
            for table in seq.block_tables
        )
        self.timeline.add(
            start,
            seconds,
            used=used / cache.pool.num_blocks,
            stored=(used * size - empty) // cache.layout.num_groups,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting + (self.scheduler.lives.admission.early is not None),
            limit=LIMITS.index(self._limit(plan)),
        )

    def _limit(self, plan: Plan) -> str:
        scheduler, cache = self.scheduler, self.cache
        if scheduler.lives.admission.early is not None:
            return "pages"
        if not scheduler.num_waiting:
            return "none"
        # Those that have ended keep their seats until no step in flight includes them.
        if len(cache.ways) >= scheduler.config.max_num_seqs:
            return "sequences"
        live = (seq for seq, _ in self._live.values())
        head = next(seq for seq in live if seq.status is Status.WAITING)
        # A step that is full, or has cut a prompt, has no room for more.
        is_full = plan.num_tokens == plan.bucket.tokens or any(
            chunk.start + chunk.count < len(chunk.seq.tokens) for chunk in plan.chunks
        )
        has_pages = cache.needed(head, cache.match(head)) <= cache.num_available
        return "tokens" if is_full and has_pages else "pages"

    def counts(self) -> dict[str, int]:
        """What happened so far.

        Of sequences that came back after a preemption, `restored_tokens` were still there or
        came from host memory, and `recomputed_tokens` had been computed and were gone. Pages are
        `saved` to host memory and `loaded` from it; `evicted` ones made room. `prefix_queries` are
        tokens of prompts admitted, `prefix_hits` those that the cache had; `padded_tokens` are
        those of all `bucket_tokens` that nobody asked for.
        """
        scheduler, stats, host = self.scheduler, self.cache.stats, self.host
        return {
            "steps": self._steps,
            "preemptions": scheduler.num_preemptions,
            "recomputed_tokens": self._recomputed,
            "restored_tokens": self._restored,
            "pages_saved": host.num_saved if host is not None else 0,
            "pages_loaded": host.num_loaded if host is not None else 0,
            "pages_evicted": stats.evicted,
            "prefix_queries": stats.queried,
            "prefix_hits": stats.hit,
            "bucket_tokens": scheduler.bucket_tokens,
            "padded_tokens": scheduler.padded_tokens,
        }
