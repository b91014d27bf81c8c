"""Texts into vectors: a thread packs what waits, side by side, into steps of static sizes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from prometheus_client import Gauge

from ..checkpoint import load_pooling_model, open_checkpoint, pooling_of, resolve_model
from ..checkpoint.load_pooling import PoolingModel
from ..config import PARTS, EngineConfig
from ..errors import (
    ConfigError,
    EngineDeadError,
    LlmjaxError,
    QueueFullError,
    ShutdownError,
)
from ..metrics import LABELS, Metrics
from ..tokenizer import Tokenizer
from .compile import Programs, enable_persistent_cache, on_cpu
from .draining import wait_and_stop
from .pooling_inputs import InputMaker, PoolingInput
from .pooling_step import PoolingBatch, PoolingBuckets, make_pool

log = logging.getLogger(__name__)

HONOURED = {
    *("model", "dtype", "max_model_len", "served_model_name", "pooling"),
    *("max_num_seqs", "max_num_batched_tokens", "max_queue_len"),
    *("token_buckets", "background", "compilation_cache_dir"),
}
"""Fields of an EngineConfig's parts that mean something without generation."""
_CPU_STEP_TOKENS, _STEP_TOKENS = 512, 4096
"""Larger steps gain no speed, while the scores of texts that do not see each other grow."""


def make_pooling_engine(config: EngineConfig) -> PoolingEngine | None:
    """An engine for a model that embeds or scores; None where it generates text.

    Raises:
        ModelLoadError: the model cannot be found or loaded.
        ConfigError: an option is for models that generate, or not for this one.
    """
    checkpoint = open_checkpoint(resolve_model(config.model.model))
    pooling = pooling_of(checkpoint, config.model.pooling)
    if pooling is None:
        return None
    _check_options(config, "scores pairs of texts" if pooling.task == "score" else "embeds texts")
    return PoolingEngine(config, load_pooling_model(checkpoint, pooling, dtype=config.model.dtype))


def _check_options(config: EngineConfig, does: str) -> None:
    others = EngineConfig.of(config.model.model)
    for part in (*PARTS, None):
        ours = getattr(config, part) if part else config
        default = getattr(others, part) if part else others
        for name in (f.name for f in fields(ours) if f.name not in HONOURED | PARTS.keys()):
            if (value := getattr(ours, name)) != getattr(default, name):
                raise ConfigError(
                    f"{name} is {value!r}: it is for models that generate text, and "
                    f"{config.model.model} {does}; leave it out"
                )


@dataclass(eq=False)
class _Waiting:
    """A text in the queue, and where its vector goes."""

    input: PoolingInput
    future: Future[np.ndarray] = field(default_factory=Future)
    arrival: float = field(default_factory=time.monotonic)


class PoolingEngine:
    """Embeds texts, or scores pairs of them, given as token ids. Any thread may use it.

    Args:
        config: how to run the model.

    Attributes:
        inputs: makes them of texts.
        ended: set, in the event loop that started it, once it has stopped or cannot go on.
        metrics: what it has done.

    Raises:
        ConfigError: a value does not fit the model.
    """

    def __init__(self, config: EngineConfig, model: PoolingModel):
        enable_persistent_cache(config.compile.compilation_cache_dir)
        self.config, self.model = config, model
        self.max_model_len = _max_model_len(config, model)
        self.inputs = InputMaker(model, self.max_model_len)
        self.metrics = Metrics(config.model.name)
        self.buckets = PoolingBuckets(
            config.compile.token_buckets,
            step_tokens=min(
                config.scheduler.max_num_batched_tokens,
                _CPU_STEP_TOKENS if on_cpu() else _STEP_TOKENS,
            ),
            max_model_len=self.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        self._queue: deque[_Waiting] = deque()
        self._running: list[_Waiting] = []
        self._wake = threading.Condition()
        self._stopping = self._draining = False
        self._error: LlmjaxError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="llmjax-pooling", daemon=True)
        self.bucket_tokens = self.padded_tokens = 0
        self._add_gauges()
        self._weights, treedef = jax.tree.flatten(model.state)
        pool = make_pool(model, treedef)
        self.programs = Programs(
            self.buckets,
            lambda T: jax.jit(pool).lower(self._weights, self.buckets.empty(T)).compile(),
            self._on_compiled,
        )
        self.programs.start(background=config.compile.background)

    @property
    def task(self) -> str:
        """ "embed" or "score"."""
        return self.model.pooling.task

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model.config.vocab_size

    @property
    def generation_defaults(self) -> dict[str, float]:
        """Nothing is generated."""
        return {}

    def start(self) -> None:
        """Starts to work on what is submitted."""
        with suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, inputs: Sequence[PoolingInput]) -> list[Future[np.ndarray]]:
        """Queues texts; each future gets float32 [D], of a model that scores [1], and [T, D] of a
        text of which each token's vector is wanted.

        A future that is cancelled before its turn costs nothing.

        Raises:
            QueueFullError: too many wait already; none is queued.
            EngineDeadError: the thread has failed.
            ShutdownError: it takes nothing more.
        """
        waiting = [_Waiting(i) for i in inputs]
        with self._wake:
            self.check_health()
            if self._draining:
                raise ShutdownError("the engine is shutting down and takes no new requests")
            most = self.config.scheduler.max_queue_len
            if most is not None and len(self._queue) + len(waiting) > most:
                raise QueueFullError(
                    f"{len(self._queue)} texts wait and {len(waiting)} more were sent, allowed: "
                    f"{most} (max_queue_len)"
                )
            self._queue.extend(waiting)
            self._wake.notify_all()
        return [w.future for w in waiting]

    async def run(self, inputs: Sequence[PoolingInput]) -> list[np.ndarray]:
        """`submit`, and its results; whoever is cancelled takes back what has not begun."""
        return await asyncio.gather(*map(asyncio.wrap_future, self.submit(inputs)))

    def check_health(self) -> None:
        """Raises EngineDeadError or ShutdownError where nothing would be served."""
        if self._error is not None:
            raise type(self._error)(str(self._error))

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_requests(self) -> int:
        """Texts whose vectors are not there yet."""
        with self._wake:
            return len(self._queue) + len(self._running)

    async def drain(self, timeout: float) -> int:
        """Refuses new requests, waits for those there are, then stops.

        Returns:
            How many had not ended within `timeout` seconds and are cut off.
        """
        self._draining = True
        return await wait_and_stop(self, timeout)

    def stop(self) -> None:
        """Ends after the step at hand, without waiting for it; what waits fails."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def close(self) -> None:
        """Stops, and waits until it has stopped, compilation too."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.programs.close()

    def describe(self) -> str:
        """What was loaded, for people."""
        model, pooling = self.model, self.model.pooling
        gives = "scores of pairs" if pooling.task == "score" else "embeddings"
        unit = ", of length 1" if pooling.normalize else ""
        return "\n".join(
            [
                f"model     {self.config.model.model} ({model.config.architecture})",
                f"weights   {model.weight_bytes / 2**20:,.1f} MiB, {model.dtype.name}",
                f"gives     {gives}, pooling {pooling.mode}{unit}",
                f"context   {self.max_model_len:,} tokens",
                self.buckets.table(),
            ]
        )

    def _run(self) -> None:
        try:
            while batch := self._next():
                self._step(batch)
            self._fail(ShutdownError("the engine was shut down before the request had ended"))
        except Exception as error:
            log.exception("the pooling thread failed")
            failed = EngineDeadError(f"the engine has stopped: {error}")
            failed.__cause__ = error
            self._fail(failed)
        finally:
            if self._loop is not None:
                with suppress(RuntimeError):  # it is closed
                    self._loop.call_soon_threadsafe(self.ended.set)

    def _next(self) -> list[_Waiting]:
        """The texts of the next step, those that have waited longest; none: it is the end."""
        with self._wake:
            while True:
                while not (self._queue or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return []
                if batch := self._take():
                    self._running = batch
                    return batch

    def _take(self) -> list[_Waiting]:
        """As many as a step takes; a text that is longer than steps have is alone in one."""
        batch: list[_Waiting] = []
        tokens, room = 0, self.buckets.seqs(self.buckets.all[-1])
        while self._queue and len(batch) < room:
            tokens += len(self._queue[0].input.token_ids)
            if batch and tokens > self.buckets.step_tokens:
                break
            waiting = self._queue.popleft()
            if waiting.future.set_running_or_notify_cancel():
                batch.append(waiting)
            else:
                tokens -= len(waiting.input.token_ids)
        return batch

    def _step(self, batch: list[_Waiting]) -> None:
        began, tokens = time.monotonic(), sum(len(w.input.token_ids) for w in batch)
        T = self.buckets.choose(tokens, len(batch))
        packed = self._pack(batch, T)
        pooled, states = self.programs[T](self._weights, packed)
        results = _results(batch, packed, np.asarray(pooled), states)
        now = time.monotonic()
        self.bucket_tokens += T
        self.padded_tokens += T - tokens
        self.metrics.iteration_tokens.observe(tokens)
        self.metrics.prefill_tokens.inc(tokens)
        self.metrics.prompt_tokens.inc(tokens)
        self._running = []
        for waiting, result in zip(batch, results, strict=True):
            self.metrics.request_prompt_tokens.observe(len(waiting.input.token_ids))
            self.metrics.queue_time.observe(began - waiting.arrival)
            self.metrics.e2e_latency.observe(now - waiting.arrival)
            waiting.future.set_result(result)

    def _pack(self, batch: list[_Waiting], T: int) -> PoolingBatch:
        return self.buckets.pack([waiting.input for waiting in batch], T)

    def _fail(self, error: LlmjaxError) -> None:
        with self._wake:
            self._error = error
            waiting, self._queue = [*self._running, *self._queue], deque()
            self._running = []
        for w in waiting:
            with suppress(InvalidStateError):  # cancelled
                w.future.set_exception(error)

    def _on_compiled(self, bucket: int, began: float) -> None:
        self.metrics.compiled_programs.inc()
        self.metrics.compile_seconds.inc(time.perf_counter() - began)

    def _add_gauges(self) -> None:
        values: dict[str, tuple[str, Any]] = {
            "num_requests_running": ("Texts in the step at hand.", lambda: self.num_running),
            "num_requests_waiting": ("Texts that wait.", lambda: self.num_waiting),
            "step_bucket_tokens": (
                "Tokens computed in steps, padding too.",
                lambda: self.bucket_tokens,
            ),
            "step_padded_tokens": ("Of these, padding.", lambda: self.padded_tokens),
        }
        for name, (text, read) in values.items():
            gauge = Gauge(f"llmjax:{name}", text, LABELS, registry=self.metrics.registry)
            gauge.labels(self.config.model.name, "0").set_function(read)


def _results(
    batch: Sequence[_Waiting], packed: PoolingBatch, pooled: np.ndarray, states: jax.Array
) -> list[np.ndarray]:
    """What each text of a step asked for, in arrays of their own: or each would hold them all."""
    of_tokens = np.empty(0)
    if any(waiting.input.of_tokens for waiting in batch):
        of_tokens = np.asarray(states).astype(np.float32)
    return [
        of_tokens[start : start + count].copy() if waiting.input.of_tokens else vector.copy()
        for waiting, vector, start, count in zip(
            batch, pooled, packed.starts, packed.counts, strict=False
        )
    ]


def _max_model_len(config: EngineConfig, model: PoolingModel) -> int:
    asked, own = config.model.max_model_len, model.config.max_position
    if asked is not None and asked > own:
        raise ConfigError(f"max_model_len is {asked}, the model allows up to {own}")
    return asked or min(own, model.pooling.max_length or own)
