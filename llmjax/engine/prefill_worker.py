"""Computes prompts for other engines, and sends them the pages. Also: who those engines ask."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import jax
import numpy as np

from ..cache.brought import pages_of, wanted_of
from ..config import EngineConfig, PrefillConfig
from ..errors import ConfigError, LlmjaxError
from ..request import FinishReason, Request, RequestOptions, SamplingParams, Sequence
from ..transfer.client import SocketConnector
from ..transfer.connector import (
    PART_PAGES,
    Connector,
    Failure,
    Guest,
    Job,
    Message,
    Pages,
    Part,
    Place,
    Terms,
)
from ..transfer.memory import MemoryConnector
from ..transfer.sockets import Address
from .handover import Handover

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger(__name__)

_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
_DIGEST_VALUES = 4096
"""Values of each weight that tell one model from another."""


class PrefillWorker:
    """Runs an engine that does nothing but prompts.

    Each ends with one token, which nobody reads; before its pages are let go they are read.

    Args:
        engine: of its own.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: SimpleQueue[tuple[Guest, Message] | None] = SimpleQueue()
        self._ids = map(str, count())
        self._jobs: dict[str, tuple[Guest, Job]] = {}
        engine.scheduler.lives.on_end = self._send_pages
        engine.runner.read_pages([0])  # or the first job waits for it to be compiled

    def deliver(self, guest: Guest, message: Message) -> None:
        """For guests, in any thread."""
        self._inbox.put((guest, message))

    def stop(self) -> None:
        """Ends `run` after the step at hand. Any thread, or a signal handler, may call it."""
        self._inbox.put(None)

    def run(self) -> None:
        """Serves until it is stopped."""
        while self._read_inbox():
            if self.engine.has_work:
                self._step()

    def _read_inbox(self) -> bool:
        """Handles what has come, and waits for it where nothing else is to be done."""
        try:
            while True:
                told = self._inbox.get(block=not self.engine.has_work)
                if told is None:
                    return False
                self._handle(*told)
        except Empty:
            return True

    def _handle(self, guest: Guest, message: Message) -> None:
        if isinstance(message, Job):
            self._begin(guest, message)
            return
        for request_id, (owner, job) in list(self._jobs.items()):
            if owner is guest and (message is None or job.id == message.job_id):
                del self._jobs[request_id]
                self.engine.abort(request_id)

    def _begin(self, guest: Guest, job: Job) -> None:
        request_id = next(self._ids)
        try:
            options = RequestOptions(cache_salt=job.salt)
            request = Request(request_id, list(job.token_ids), _ONE_TOKEN, options=options)
            self.engine.add(request)
        except LlmjaxError as error:
            guest.reply(Failure(job.id, str(error)))
        else:
            self._jobs[request_id] = (guest, job)

    def _step(self) -> None:
        for delta in self.engine.step():
            # With its pages it has left already.
            if delta.finish_reason is not None and delta.request_id in self._jobs:
                guest, job = self._jobs.pop(delta.request_id)
                guest.reply(Failure(job.id, str(delta.error or "the worker has aborted it")))

    def _send_pages(self, seq: Sequence) -> None:
        """A sequence has ended, and has its pages still."""
        if seq.finish_reason is FinishReason.ABORT or seq.request.id not in self._jobs:
            return
        guest, job = self._jobs.pop(seq.request.id)
        found = pages_of(self.engine.layout, seq, job.start)
        pages = [(Place(*at), page) for at, page in found.items()]
        parts = []
        for i in range(0, len(pages), PART_PAGES):
            places, ids = zip(*pages[i : i + PART_PAGES], strict=True)
            parts.append(Part(list(places), self.engine.runner.read_pages(ids)))
        guest.reply(Pages(job.id, parts, seq.num_cached_tokens))


def make_handover(engine: Engine) -> Handover | None:
    """What `engine.config.prefill` asks for.

    Raises:
        ConfigError: host memory does not hold the pages of one long prompt.
        PrefillMismatchError: a worker runs another model, or keeps pages in another way.
    """
    config = engine.config.prefill
    if not config.prefill_from:
        return None
    _check_room(engine)
    news = engine.news
    terms: Terms | None = None
    workers: list[Connector] = []
    try:
        for address in map(Address.of, config.prefill_from):
            if address.kind == "memory":
                workers.append(_second_engine(engine, news.set))
            else:
                terms = terms or terms_of(engine)
                workers.append(SocketConnector(address, terms, news.set))
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return Handover(engine.cache, workers, config, engine.metrics, news, engine.page_bytes)


def terms_of(engine: Engine) -> Terms:
    """What pages of this engine are, and of which model."""
    layout, model = engine.layout, engine.model
    arrays = engine.runner.page_arrays()
    values = {
        "model": f"{model.config.architecture} {_digest(engine)}",
        "weights": model.weight_type,
        "kernels": "native" if model.native else "XLA",
        "KV cache dtype": engine.kv_format.name,
        "page size": layout.block_size,
        "windows": list(layout.windows),
        "layers": [list(place) for place in layout.places],
        "arrays of a page": [[list(shape), dtype.name] for shape, dtype in arrays],
    }
    return Terms(values, arrays, engine.max_model_len)


def _digest(engine: Engine) -> str:
    """Of the model's configuration, and of some values of each weight."""
    found = hashlib.sha256(repr(engine.model.config).encode())
    for leaf in jax.tree.leaves(engine.model.state):
        values = np.asarray(leaf).reshape(-1)
        step = max(1, values.size // _DIGEST_VALUES)
        found.update(f"{leaf.shape} {leaf.dtype}".encode())
        found.update(np.ascontiguousarray(values[::step]).view(np.uint8).tobytes())
    return found.hexdigest()[:16]


def _check_room(engine: Engine) -> None:
    """Refuses what could never hold the pages that come."""
    needed = len(wanted_of(engine.layout, engine.max_model_len, 0))
    slots = engine.host.num_slots if engine.host is not None else 0
    if slots < needed:
        gib = needed * engine.page_bytes / 2**30
        raise ConfigError(
            f"swap_space and kv_offloading_size have room for {slots} pages, and prefill_from "
            f"needs {needed} ({gib:.3g} GiB), those of a prompt of max_model_len"
        )


def worker_config(config: EngineConfig) -> EngineConfig:
    """Of a prefill engine: what concerns decoding, queues and host memory is left out."""
    scheduler = replace(
        config.scheduler,
        max_queue_len=None,
        queue_timeout=None,
        scheduling_policy="fcfs",
        fair_users=False,
    )
    cache = replace(config.cache, swap_space=0.0, kv_offloading_size=0.0)
    return replace(config, scheduler=scheduler, cache=cache, prefill=PrefillConfig(), trace=None)


def _second_engine(engine: Engine, on_news: Callable[[], None]) -> MemoryConnector:
    """A worker in this process, with the same weights and as many pages."""
    from .engine import Engine  # which makes this one's

    config = worker_config(engine.config)
    own = replace(config.cache, num_gpu_blocks_override=engine.num_pages)
    model = replace(config.model, max_model_len=engine.max_model_len)
    other = Engine(replace(config, cache=own, model=model), engine.model)
    worker = PrefillWorker(other)

    def run() -> None:
        try:
            worker.run()
        except Exception:
            log.exception("the prefill worker in this process has failed")
        finally:
            connector.dismiss("the worker has ended")

    def end() -> None:
        worker.stop()
        thread.join()
        other.close()

    connector = MemoryConnector(worker.deliver, other.max_model_len, on_news, end)
    thread = threading.Thread(target=run, name="llmjax-worker", daemon=True)
    thread.start()
    return connector
