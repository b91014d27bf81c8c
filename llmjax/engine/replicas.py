"""Copies of an engine on devices of their own, behind one front that is used like an engine.

One thread plans, dispatches and commits the steps of all; only waiting for a device is left to
threads of its own, one for each replica. So nothing here is locked, replicas never wait for each
other, and what concerns them all (who is placed where, how many wait, whose turn it is, seeds) is
exact.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from ..checkpoint import LoadedModel
from ..config import EngineConfig
from ..metrics import Metrics
from ..parallel.group import Group
from ..request import Request, SequenceDelta
from ..structured import GrammarCompiler
from .engine import WAIT_SECONDS, Engine
from .lives import check_room
from .placement import Placement
from .stats import EngineStats
from .trace import NoTrace


class _Replica:
    """One engine, and whether its oldest step in flight is being waited for."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.awaited: Future[object] | None = None

    def cached(self, request: Request) -> int:
        return self.engine.cache.cached(request)

    @property
    def room(self) -> int:
        layout = self.engine.layout
        return self.engine.cache.num_available * layout.block_size // layout.num_groups

    @property
    def is_done(self) -> bool:
        """Whether its oldest step in flight can be read."""
        return self.awaited is not None and self.awaited.done()

    def launch(self, deltas: list[SequenceDelta]) -> None:
        """Dispatches steps until one of them is to be read; adds to `deltas`."""
        dispatched = True
        while dispatched and not self.engine.is_ahead:
            more, dispatched = self.engine.launch()
            deltas += more


class Replicas:
    """`data_parallel_size` engines with one model. One thread at a time may use it.

    Attributes:
        replicas: the engines, in the order of their numbers.
        placement: who runs where.

    Raises:
        as `Engine`.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        engines = [Engine(config)]
        try:
            for number in range(1, config.parallel.data_parallel_size):
                engines.append(Engine(config, first=engines[0], number=number))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        self.replicas = tuple(engines)
        self._replicas = [_Replica(engine) for engine in engines]
        self._queues = [engine.scheduler.lives.waiting for engine in engines]
        self._queues[0].share(self._queues[1:])
        self.placement = Placement(
            self._replicas,
            block_size=engines[0].layout.block_size,
            reuse=config.cache.enable_prefix_caching,
        )
        self._news = engines[0].news
        self._untold: list[SequenceDelta] = []
        self._at_work = self._replicas[0]
        self._waiters = ThreadPoolExecutor(len(engines), thread_name_prefix="llmjax-wait")

    # What the replicas have in common

    @property
    def model(self) -> LoadedModel:
        """That of the first; the others have copies."""
        return self.replicas[0].model

    @property
    def metrics(self) -> Metrics:
        return self.replicas[0].metrics

    @property
    def trace(self) -> NoTrace:
        return self.replicas[0].trace

    @property
    def grammars(self) -> GrammarCompiler:
        return self.replicas[0].grammars

    @property
    def max_model_len(self) -> int:
        return self.replicas[0].max_model_len

    # As an engine

    def add(self, request: Request) -> None:
        """Queues a request at the replica that `placement` chooses; see `Engine.add`."""
        self.replicas[0].check(request)
        check_room(self.config.scheduler.max_queue_len, self._queues, time.monotonic())
        place = self.placement.choose(request)
        self.replicas[place.replica].queue(request)
        request.engine = place.replica
        self.placement.take(request, place)

    def step(self) -> list[SequenceDelta]:
        """Dispatches what can be, and commits what has come; waits for one replica where none has.

        Not for long: others may have news, or late requests, meanwhile.
        """
        deltas = self._untold
        for replica in self._replicas:
            self._at_work = replica
            if replica.awaited is None and replica.engine.has_work:
                replica.launch(deltas)
                self._await(replica)
        if self.has_work and not deltas and not any(r.is_done for r in self._replicas):
            self._news.wait(WAIT_SECONDS)
        # Before looking: what comes from here on is seen in the next step.
        self._news.clear()
        for replica in self._replicas:
            self._at_work = replica
            if replica.is_done:
                replica.awaited = None
                deltas += replica.engine.finish()
        return self._take_news()

    def recover(self, cause: Exception) -> list[SequenceDelta]:
        """Lets the replica go on whose step raised; see `Engine.recover`."""
        self._at_work.awaited = None
        self._untold += self._at_work.engine.recover(cause)
        return self._take_news()

    def _take_news(self) -> list[SequenceDelta]:
        news, self._untold = self._untold, []
        self.placement.follow(news)
        return news

    def _await(self, replica: _Replica) -> None:
        """Lets a thread wait for the replica's oldest step in flight, if there is one."""
        step = replica.engine.oldest
        if step is not None:
            replica.awaited = self._waiters.submit(jax.block_until_ready, step.sampled)
            replica.awaited.add_done_callback(lambda _: self._news.set())

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceDelta]:
        """Ends a request, or one choice of it, wherever it is; unknown ids are ignored."""
        deltas = [delta for e in self.replicas for delta in e.abort(request_id, index)]
        self.placement.follow(deltas)
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended or any step has not been committed."""
        return any(engine.has_work for engine in self.replicas)

    def wake(self) -> None:
        """Ends the wait of a step, as there is something new to do. Any thread may call it."""
        self._news.set()

    def stats(self) -> EngineStats:
        """Of all together."""
        return EngineStats.total([engine.stats() for engine in self.replicas])

    def describe(self) -> str:
        """What was loaded and how much memory it takes, for people."""
        tensor = self.config.parallel.tensor_parallel_size
        each = "a device" if tensor == 1 else f"{tensor} devices"
        replicas = f"replicas  {len(self.replicas)} of what follows, on {each} each"
        return f"{replicas}\n{self.replicas[0].describe()}"

    def close(self) -> None:
        """Closes them all."""
        for engine in self.replicas:
            engine.close()
        self._waiters.shutdown()


def make_engine(config: EngineConfig, group: Group | None = None) -> Engine | Replicas:
    """An engine, or as many as `data_parallel_size` says.

    Args:
        group: the processes that run it together; then it is one.
    """
    if config.parallel.data_parallel_size == 1 or group is not None:
        return Engine(config, group=group)
    return Replicas(config)
