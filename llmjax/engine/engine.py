"""The engine: schedule, run, commit, sample; step n + 1 is dispatched before step n is read."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from pathlib import Path

import jax

from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.native import instruction_set, set_threads
from llmjax_kernels.paged_attention import serving

from ..cache.block_pool import BlockPool
from ..cache.host_pool import HostPool, MoveCosts
from ..cache.layout import KVLayout
from ..cache.manager import KVCache
from ..checkpoint import LoadedModel, load_model, resolve_model
from ..checks import shown
from ..config import EngineConfig
from ..errors import ChatTemplateError, ConfigError, InvalidRequestError, RequestFailedError
from ..metrics import Metrics
from ..models import DecoderConfig
from ..parallel.mesh import make_mesh
from ..request import Request, Sequence, SequenceDelta, Status
from ..structured import GrammarCompiler
from ..tokenizer import compile_template
from .buckets import Bucket, Buckets
from .compile import enable_persistent_cache
from .condense import check_eviction
from .context import fit_context, make_layout, most_chunk
from .handover import Handover
from .memory import count_pages, page_bytes
from .prefill_worker import make_handover
from .runner import InFlight, Runner
from .scheduler import Plan, Scheduler
from .stats import EngineStats
from .trace import make_trace

log = logging.getLogger(__name__)

_TIMED_TOKENS = 64
"""Smaller steps say little of what a prompt's token takes."""
_WAIT_SECONDS = 0.05
"""Of a step that has nothing to do but to wait for a prefill worker: deadlines go on meanwhile."""
_CPU_STEP_TOKENS = 512
"""Larger steps gain no speed on a CPU and make everyone wait."""


class Engine:
    """Runs requests, given as token ids, to their ends. One thread at a time may use it.

    Args:
        config: what to load and how to run it.
        model: where it is loaded already.

    Attributes:
        grammars: compiles what requests bring in `Request.rules`.
        handover: holds requests whose prompts prefill workers compute, where there are any.
        num_steps: steps that have been committed, so far.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: it does not fit the machine, or values contradict each other.
        PrefillMismatchError: a prefill worker's pages are of no use here.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel | None = None):
        enable_persistent_cache(config.compile.compilation_cache_dir)
        self.config = config
        self.trace = make_trace(config.trace, f"llmjax {config.model.name}")
        self.metrics = Metrics(config.model.name)
        template = _template_text(config.model.chat_template)
        self.model: LoadedModel = model or load_model(
            resolve_model(config.model.model),
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            mesh=make_mesh(config.parallel.tensor_parallel_size),
            check=self._check_model,
            page_size=config.cache.block_size,
        )
        if self.model.native:
            set_threads(config.threads or 0)
        if template is not None:
            self.model.tokenizer.chat_template = template
        self._default_seed = random.Random(config.model.seed)
        asked = config.cache.kv_cache_dtype
        self.kv_format = self.model.kv_format if asked == "auto" else KV_FORMATS[asked]
        self.layout, self.max_model_len, self.num_pages = self._size_memory()
        self.page_bytes = page_bytes(self.model.config, self.layout, self.kv_format)
        self.buckets = self._make_buckets(self.layout.whole(self.max_model_len))
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
        )
        if self.host is not None:
            self.host.costs.save, self.host.costs.load = self.runner.time_moves()
        self.grammars = GrammarCompiler(self.model.tokenizer, self.model.config.vocab_size)
        self._last_collected: float | None = None
        self._in_flight: deque[InFlight] = deque()
        self._news: list[SequenceDelta] = []
        self.num_steps = 0
        self.handover: Handover | None = None
        try:
            self.handover = make_handover(self)
        except BaseException:
            self.close()
            raise
        log.info("step programs:\n%s", self.buckets.table())

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: it can never run: bad ids, or too long.
            QueueFullError: too many wait already.
        """
        self._check(request)
        regime = self.model.config.regime(len(request.prompt_token_ids))
        request.kv_key = (request.options.cache_salt, regime)
        seed = request.params.seed
        if seed is None:
            seed = self._default_seed.getrandbits(63)
        choices = [
            Sequence(request, index, seed + index, list(request.prompt_token_ids))
            for index in range(request.params.n)
        ]
        if request.rules is not None:
            for seq in choices:
                seq.constraint = request.rules.start()
        for seq in choices:
            self.scheduler.add(seq)
        if self.handover is not None:
            self.handover.consider(choices)

    def step(self) -> list[SequenceDelta]:
        """Dispatches the next step if there is one, and commits the one before it.

        Requests that are late are ended first. Where all wait for prefill workers, so does this,
        but not for long.
        """
        began = time.perf_counter()
        expired = self.scheduler.expire()
        self._news += expired
        if self.handover is not None:
            self.handover.poll()
        plan = self.scheduler.schedule()
        if plan is not None:
            scheduled = time.perf_counter()
            self._in_flight.append(self.runner.dispatch(plan))
            self.trace.dispatched(plan, began, scheduled, self.scheduler.num_preemptions)
            self._observe(plan)
        if len(self._in_flight) > (plan is not None):
            self._news += self._collect()
        elif plan is None and self.handover is not None and self.awaits_pages and not expired:
            self.handover.wait(_WAIT_SECONDS)
        if plan is not None:
            # Now all tokens before those to be sampled are known.
            self.runner.sample(self._in_flight[-1])
        return self._take_news()

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
        self._news += self.scheduler.fail_steps(error)
        self.scheduler.check_balance()
        self.runner.reset()
        return self._take_news()

    def _take_news(self) -> list[SequenceDelta]:
        news, self._news = self._news, []
        return news

    def _collect(self) -> list[SequenceDelta]:
        """Commits the oldest step in flight."""
        step, began = self._in_flight.popleft(), time.perf_counter()
        result = self.runner.collect(step)
        self.trace.collected(step.plan, began)
        self.num_steps += 1
        self._time(step.plan)
        self._observe_first_tokens(step.plan)
        if not self._in_flight:
            self.trace.flush()
        return self.scheduler.commit(
            step.plan, result.token_ids, result.logprobs, result.prompt_logprobs
        )

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
        if self.handover is not None:
            self.handover.news.set()

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
        self.metrics.decode_tokens.inc(plan.num_decodes)
        self.metrics.prefill_tokens.inc(plan.num_tokens - plan.num_decodes)
        now = time.monotonic()
        for chunk in plan.admitted:
            chunk.seq.request.has_begun = True
            if not chunk.seq.started:
                chunk.seq.started = now
                self.metrics.queue_time.observe(now - chunk.seq.request.arrival_time)

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
        seconds, num_decodes = self._last_collected - last, plan.num_decodes
        if num_decodes:
            self.scheduler.pace.observe(plan.num_tokens - num_decodes, num_decodes, seconds)
        if self.host is not None and plan.num_tokens >= _TIMED_TOKENS:
            costs = self.host.costs
            costs.compute += 0.2 * (seconds / plan.num_tokens - costs.compute)

    def _make_host(self) -> HostPool | None:
        cache = self.config.cache
        costs = MoveCosts(compute=1e-3)
        space, more = cache.swap_space, cache.kv_offloading_size
        return HostPool.sized(space, more, self.page_bytes, costs)

    def _check(self, request: Request) -> None:
        params, priority = request.params, request.options.priority
        policy = self.config.scheduler.scheduling_policy
        if priority and policy != "priority":
            raise InvalidRequestError(
                f"priority is {priority}, allowed: 0, as the scheduling policy is {policy!r} and "
                "not 'priority'",
                param="priority",
            )
        vocab = self.model.config.vocab_size
        named = {
            "prompt": request.prompt_token_ids,
            "stop_token_ids": params.stop_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for param, values in named.items():
            bad = next((i for i in values if not 0 <= i < vocab), None)
            if bad is not None:
                raise InvalidRequestError(
                    f"token id {bad} in {param} is not in the vocabulary, allowed: 0 to "
                    f"{vocab - 1}",
                    param=param,
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.config.max_logprobs:
                raise InvalidRequestError(
                    f"{name} is {value}, allowed: up to {self.config.max_logprobs} (max_logprobs)",
                    param=name,
                )

    def _check_model(self, model: DecoderConfig, native: bool) -> None:
        """Refuses what the model does not allow, before its weights are loaded."""
        if self.config.threads is not None and not native:
            raise ConfigError("threads: only the native CPU kernels take it, and XLA serves here")
        asked, own = self.config.model.max_model_len, model.max_position
        cache, pages = self.config.cache, self.config.cache.num_gpu_blocks_override
        layout = make_layout(cache, model.windows, asked or own)
        most = own if layout.eviction is None else check_eviction(layout.eviction, model)
        if asked is not None and asked > most:
            raise ConfigError(f"max_model_len is {asked}, the model allows up to {most}")
        # Pages of a sequence are checked later where max_model_len may still be lowered.
        self._make_buckets(layout.whole(asked or 1))
        if pages is not None:
            fit_context(asked, own, pages, layout, self.config.scheduler)

    def _make_buckets(self, max_model_len: int) -> Buckets:
        return Buckets(
            self.config.scheduler,
            self.config.compile,
            max_model_len=max_model_len,
            block_size=self.config.cache.block_size,
            step_tokens=_CPU_STEP_TOKENS if _on_cpu() else None,
        )

    def _size_memory(self) -> tuple[KVLayout, int, int]:
        """Chooses how layers share pages, max_model_len and the number of pages."""
        scheduler, model = self.config.scheduler, self.model.config
        asked, own = self.config.model.max_model_len, model.max_position
        layout = make_layout(self.config.cache, model.windows, asked or own)
        buckets = self._make_buckets(layout.whole(asked or own))
        pages = count_pages(self.config, self.model, layout, self.kv_format, buckets)
        given = self.config.cache.num_gpu_blocks_override
        if given is None and "memory" in (self.config.prefill.prefill_from or ()):
            pages //= 2  # the second engine takes as many
        size = page_bytes(model, layout, self.kv_format)
        log.info("KV pool: %d pages, %.2f GiB", pages, pages * size / 2**30)
        log.info("prefix reuse: %s", layout.describe_reuse())
        length = fit_context(asked, own, pages, layout, scheduler)
        if length < (asked or own):
            log.warning(
                "max_model_len is lowered from %d to %d, what the KV pool holds", own, length
            )
        return layout, length, pages


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _template_text(template: str | None) -> str | None:
    """A chat template given as text, or as the path of a file that holds it."""
    if template is None:
        return None
    if "{" in template or "\n" in template:
        text = template
    else:
        try:
            text = Path(template).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"chat_template is {shown(template)}, allowed: Jinja text, or a file that can be "
                f"read ({error})"
            ) from error
    try:
        compile_template(text)
    except ChatTemplateError as error:
        raise ConfigError(f"chat_template: {error}") from error
    return text
