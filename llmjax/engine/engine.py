"""The engine: schedule, run, commit, sample; step n + 1 is dispatched before step n is read."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque

from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.native import instruction_set, set_threads
from llmjax_kernels.paged_attention import serving

from ..cache.block_pool import BlockPool
from ..cache.host_pool import HostPool, MoveCosts
from ..cache.manager import KVCache
from ..checkpoint import LoadedModel
from ..config import EngineConfig
from ..errors import RequestFailedError
from ..metrics import Metrics
from ..parallel.group import Group
from ..parallel.mesh import make_places
from ..request import Request, Sequence, SequenceDelta, Status, longest
from ..structured import GrammarCompiler
from .buckets import Bucket
from .compile import enable_persistent_cache
from .context import most_chunk
from .handover import Handover
from .memory import host_space, page_bytes
from .prefill_worker import make_handover
from .runner import InFlight, Runner
from .scheduler import Plan, Scheduler
from .setup import check_request, load, make_buckets, size_memory
from .stats import EngineStats
from .trace import make_trace

log = logging.getLogger(__name__)

_TIMED_TOKENS = 64
"""Smaller steps say little of what a prompt's token takes."""
WAIT_SECONDS = 0.05
"""Of a step that has nothing to do but to wait for a prefill worker: deadlines go on meanwhile."""
_DEPTH = 2
"""Steps that are dispatched before the first of them is read, at least: one a stage."""


class Engine:
    """Runs requests, given as token ids, to their ends. One thread at a time may use it.

    Args:
        config: what to load and how to run it.
        model: where it is loaded already.
        first: of the replicas of which this is another: its model is copied, and they have one
            row of seeds, one trace, one registry of metrics and one event for news.
        number: of the replica.
        group: the processes that run it together, each with an engine like this one. Only that
            of the leader is given requests; see `follower.py`.

    Attributes:
        grammars: compiles what requests bring in `Request.rules`.
        handover: holds requests whose prompts prefill workers compute, where there are any.
        news: ends the wait for something to do.
        num_steps: steps that have been committed, so far.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: it does not fit the machine, or values contradict each other.
        PrefillMismatchError: a prefill worker's pages are of no use here.
        GroupError: another process is lost.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel | None = None,
        *,
        first: Engine | None = None,
        number: int = 0,
        group: Group | None = None,
    ):
        enable_persistent_cache(config.compile.compilation_cache_dir)
        self.config = config
        if first is None:
            self.trace = make_trace(config.trace, f"llmjax {config.model.name}")
            self.metrics = Metrics(config.model.name)
            self.seeds, self.news = random.Random(config.model.seed), threading.Event()
        else:
            self.trace = first.trace.beside(f"llmjax {config.model.name}, engine {number}")
            self.metrics = Metrics(config.model.name, number, first.metrics)
            self.seeds, self.news = first.seeds, first.news
            (place,) = make_places(config.parallel)[number]
            model = first.model.on(place)
        self.model: LoadedModel = model or load(config)
        if self.model.native:
            set_threads(config.threads or 0)
        asked = config.cache.kv_cache_dtype
        self.kv_format = self.model.kv_format if asked == "auto" else KV_FORMATS[asked]
        self.layout, self.max_model_len, self.num_pages = size_memory(
            config, self.model, self.kv_format, group
        )
        self.page_bytes = page_bytes(self.model.config, self.layout, self.kv_format)
        self.buckets = make_buckets(config, self.layout.whole(self.max_model_len))
        self.host = self._make_host()
        self.cache = KVCache(
            BlockPool(self.num_pages),
            self.layout,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            host=self.host,
            chunk=most_chunk(config.scheduler, self.max_model_len),
        )
        self.cache.store.on_decision = self.trace.on_decision
        self.scheduler = Scheduler(
            config.scheduler,
            self.buckets,
            self.cache,
            max_model_len=self.max_model_len,
            stages=config.parallel.pipeline_parallel_size,
        )
        self.runner = Runner(
            config,
            self.model,
            self.buckets,
            layout=self.layout,
            kv_format=self.kv_format,
            max_model_len=self.max_model_len,
            num_pages=self.num_pages,
            num_slots=self.host.num_slots if self.host is not None else 0,
            on_compiled=self._on_compiled,
            group=group,
        )
        if self.host is not None:
            self.host.costs.save, self.host.costs.load = self.runner.time_moves()
        vocab = self.model.config.vocab_size
        shared = first.grammars if first is not None else None
        self.grammars: GrammarCompiler = shared or GrammarCompiler(self.model.tokenizer, vocab)
        self._last_collected: float | None = None
        self._in_flight: deque[InFlight] = deque()
        self._untold: list[SequenceDelta] = []
        self.num_steps = 0
        self.handover: Handover | None = None
        try:
            self.handover = make_handover(self)
        except BaseException:
            self.close()
            raise
        log.info("step programs:\n%s", self.buckets.table())

    @property
    def replicas(self) -> tuple[Engine, ...]:
        """Itself, as `Replicas` has several."""
        return (self,)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: it can never run: bad ids, or too long.
            QueueFullError: too many wait already.
        """
        self.check(request)
        self.queue(request)

    def check(self, request: Request) -> None:
        """Refuses what can never run, and notes what its keys and values depend on.

        Raises:
            InvalidRequestError: token ids or options are not allowed.
        """
        check_request(request, self.config, self.model.config.vocab_size)
        regime = self.model.config.regime(len(request.prompt_token_ids))
        request.kv_key = (request.options.cache_salt, regime)

    def queue(self, request: Request) -> None:
        """Queues a request that has been checked; see `add`."""
        seed = request.params.seed
        if seed is None:
            seed = self.seeds.getrandbits(63)
        choices = [
            Sequence(request, index, seed + index, list(request.prompt_token_ids))
            for index in range(request.params.n)
        ]
        if request.rules is not None:
            prompt, asked = len(request.prompt_token_ids), request.params.max_tokens
            room = longest(prompt, asked, self.scheduler.max_model_len) - prompt
            for seq in choices:
                seq.constraint = request.rules.start(room)
        for seq in choices:
            self.scheduler.add(seq)
        if self.handover is not None:
            self.handover.consider(choices)

    def step(self) -> list[SequenceDelta]:
        """Dispatches the next step if there is one, and commits the one before it.

        Requests that are late are ended first. Where all wait for prefill workers, so does this,
        but not for long.
        """
        news, dispatched = self.launch()
        if self._in_flight and (self.is_ahead or not dispatched):
            self._untold = news
            return self.finish()
        if not dispatched and self.handover is not None and self.awaits_pages and not news:
            self.handover.wait(WAIT_SECONDS)
        return news

    def launch(self) -> tuple[list[SequenceDelta], bool]:
        """Ends what is late, and dispatches the next step if there is one; waits for nothing.

        Returns:
            The last deltas of what was late, and whether a step was dispatched.
        """
        began = time.perf_counter()
        self._untold += self.scheduler.expire()
        if self.handover is not None:
            self.handover.poll()
        plan = self.scheduler.schedule()
        if plan is None:
            return self._take_news(), False
        scheduled = time.perf_counter()
        self._in_flight.append(self.runner.dispatch(plan))
        self.trace.dispatched(plan, began, scheduled, self.scheduler.num_preemptions)
        self._observe(plan)
        # What steps in flight have to do with each other is tokens, which stages do not share.
        if len(self._in_flight) == 1 or self.model.stages:
            self._sample()
        return self._take_news(), True

    def recover(self, cause: Exception) -> list[SequenceDelta]:
        """Goes on after a `step` that raised, without the requests that took part in it.

        A program that fails may take the pages with it that it was to write to. So all of them
        begin anew, nothing is cached, and the other requests that ran are computed again.

        Returns:
            The last news of the requests that have failed, and what `step` had to tell.

        Raises:
            Exception: of the device, or of the accounts of who holds what, which are off: there
                is no going on.
        """
        error = RequestFailedError(f"the step that computed this request failed: {cause}")
        error.__cause__ = cause
        self._in_flight.clear()
        self._last_collected = None
        failed = self.scheduler.fail_steps(error)
        self.metrics.steps_failed.inc()
        self.metrics.requests_failed.inc(len({delta.request_id for delta in failed}))
        self._untold += failed
        self.scheduler.check_balance()
        self.runner.reset()
        return self._take_news()

    def _take_news(self) -> list[SequenceDelta]:
        news, self._untold = self._untold, []
        return news

    @property
    def is_ahead(self) -> bool:
        """Whether the oldest step in flight is to be read before another is dispatched."""
        return len(self._in_flight) >= max(_DEPTH, len(self.model.stages))

    @property
    def oldest(self) -> InFlight | None:
        """The step in flight that `finish` reads."""
        return self._in_flight[0] if self._in_flight else None

    def finish(self) -> list[SequenceDelta]:
        """Waits for the oldest step in flight, commits it, and has the next one sampled."""
        step, began = self._in_flight.popleft(), time.perf_counter()
        result = self.runner.collect(step)
        self.trace.collected(step.plan, began)
        self.num_steps += 1
        self._time(step.plan)
        self._observe_first_tokens(step.plan)
        if not self._in_flight:
            self.trace.flush()
        self._untold += self.scheduler.commit(
            step.plan, result.token_ids, result.logprobs, result.prompt_logprobs
        )
        if self._in_flight:
            # Now all tokens before those to be sampled are known.
            self._sample()
        return self._take_news()

    def _sample(self) -> None:
        """Has the newest step sampled, if it has not been."""
        step = self._in_flight[-1]
        if step.sampled is None:
            self.runner.sample(step)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceDelta]:
        """Ends a request, or one choice of it, at once; unknown ids are ignored."""
        deltas = self.scheduler.abort(request_id, index)
        if self.handover is not None:
            self.handover.drop_ended()
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended or any step has not been committed."""
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def awaits_pages(self) -> bool:
        """Whether nothing goes on until a prefill worker has answered, or is late."""
        held = self.handover.num_held if self.handover is not None else 0
        return bool(held) and not (self._in_flight or self.scheduler.num_running)

    def wake(self) -> None:
        """Ends the wait of a step, as there is something new to do. Any thread may call it."""
        self.news.set()

    def stats(self) -> EngineStats:
        return EngineStats.of(self)

    def describe(self) -> str:
        """What was loaded and how much memory it takes, for people."""
        model, page_size = self.model, self.config.cache.block_size
        weights = model.weight_bytes
        cache = self.num_pages * self.page_bytes
        pages = f"{self.num_pages:,} pages of {page_size} tokens"
        if eviction := self.layout.eviction:
            pages += f", at most {eviction.budget:,} tokens of a request ({eviction.policy})"
        kernels = f"native ({instruction_set()})" if model.native else serving()
        return "\n".join(
            [
                f"model     {self.config.model.model} ({model.config.architecture})",
                f"weights   {weights / 2**20:,.1f} MiB, {model.weight_type}",
                f"KV cache  {cache / 2**20:,.1f} MiB, {pages}, {self.kv_format.name}",
                f"kernels   {kernels}",
                *([f"stages    {len(model.stages)}"] if model.stages else []),
                f"context   {self.max_model_len:,} tokens",
                self.buckets.table(),
            ]
        )

    def close(self) -> None:
        """Stops the compilation that goes on behind, lets go of workers, and ends the trace."""
        if self.handover is not None:
            self.handover.close()
        self.runner.programs.close()
        self.grammars.close()
        self.trace.close()

    def _on_compiled(self, bucket: Bucket, began: float) -> None:
        self.trace.compiled(bucket, began)
        self.metrics.compiled_programs.inc()
        self.metrics.compile_seconds.inc(time.perf_counter() - began)

    def _observe(self, plan: Plan) -> None:
        self.metrics.iteration_tokens.observe(plan.num_tokens)
        self.metrics.decode_tokens.inc(plan.num_decoded)
        self.metrics.prefill_tokens.inc(plan.num_tokens - plan.num_decodes)
        now = time.monotonic()
        for seq in (chunk.seq for chunk in plan.chunks):
            # What began early waits for its turn.
            if not seq.started and seq is not self.scheduler.lives.admission.early:
                seq.started = now
                seq.request.began = seq.request.began or now
                self.metrics.queue_time.observe(now - seq.request.arrival_time)

    def _observe_first_tokens(self, plan: Plan) -> None:
        """Before a step is committed that gives them."""
        now = time.monotonic()
        for chunk in plan.chunks:
            seq = chunk.seq
            if chunk.samples and not seq.output_len and seq.status is not Status.FINISHED:
                self.metrics.prefill_time.observe(now - seq.started)

    def _time(self, plan: Plan) -> None:
        """Learns from a finished step what prompt tokens and decodes take."""
        last, self._last_collected = self._last_collected, None
        if not self._in_flight:
            return  # what comes next will not have been waiting for this one
        self._last_collected = time.perf_counter()
        if last is None:
            return
        seconds = (self._last_collected - last) / plan.num_steps
        num_decodes = plan.num_decodes
        if num_decodes:
            self.scheduler.pace.observe(plan.num_tokens - num_decodes, num_decodes, seconds)
        if self.host is not None and plan.num_tokens >= _TIMED_TOKENS:
            costs = self.host.costs
            costs.compute += 0.2 * (seconds / plan.num_tokens - costs.compute)

    def _make_host(self) -> HostPool | None:
        cache, replicas = self.config.cache, self.config.parallel.data_parallel_size
        costs = MoveCosts(compute=1e-3)
        space, more = (gib / replicas for gib in host_space(cache))
        return HostPool.sized(space, more, self.page_bytes, costs)
