"""Requests of several callers in one process, who step an engine by turns."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm

from .engine.engine import Engine
from .engine.outputs import OutputProcessor
from .engine.replicas import Replicas
from .errors import ShutdownError
from .output import RequestOutput
from .request import Request, RequestOptions, SamplingParams

Encoded = tuple[str | None, list[int]]
"""A prompt: its text, where it was given as such, and its token ids."""


class Callers:
    """Whoever waits for news steps the engine, for all.

    Args:
        engine: None is one that is closed.
    """

    def __init__(self, engine: Engine | Replicas | None):
        self._engine = engine
        if engine is not None:
            self.processor = OutputProcessor(engine.model.tokenizer, engine.trace)
        self._ids = map(str, itertools.count())
        self._lock = threading.Lock()
        self._news: set[str] = set()
        self._left: deque[str] = deque()

    @property
    def engine(self) -> Engine | Replicas:
        """Raises ShutdownError where it is closed."""
        if self._engine is None:
            raise ShutdownError("this LLM is closed; load the model again to go on")
        return self._engine

    def close(self) -> None:
        """Lets go of the engine, between two steps."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def new_id(self) -> str:
        """A name that no request has."""
        return next(self._ids)

    def run(
        self, requests: Sequence[tuple[Encoded, SamplingParams, RequestOptions]], *, show: bool
    ) -> list[RequestOutput]:
        """The whole output of each; nothing runs where one of them cannot be served.

        Args:
            show: a progress bar, where there are several.
        """
        ids: list[str] = []
        try:
            for encoded, params, options in requests:
                ids.append(self._add(encoded, params, options).id)
            return self._collect(ids, show and len(ids) > 1)
        finally:
            self._forget(ids)

    def stream(
        self,
        encoded: Encoded,
        params: SamplingParams,
        options: RequestOptions,
        read: Callable[[RequestOutput], RequestOutput] = lambda output: output,
    ) -> Iterator[RequestOutput]:
        """What is new of a request, as `read` gives it; leaving the iteration ends it."""
        request = self._add(encoded, params, options)
        try:
            finished = False
            while not finished:
                (output,) = self._advance({request.id}, delta=True)
                finished = output.finished
                if output.error is not None:
                    raise output.error
                if output.outputs:
                    yield read(output)
        finally:
            self._forget([request.id])

    def _collect(self, ids: list[str], show: bool) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        waiting, tokens = set(ids), 0
        with tqdm(total=len(ids), desc="Prompts", disable=not show, dynamic_ncols=True) as bar:
            while waiting:
                for output in self._advance(waiting, delta=False):
                    outputs[output.request_id] = output
                    waiting.remove(output.request_id)
                    tokens += sum(len(c.token_ids) for c in output.outputs)
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{tokens / elapsed:.0f} tok/s", refresh=False)
                    bar.update()
        return [outputs[i] for i in ids]

    def _advance(self, request_ids: set[str], *, delta: bool) -> list[RequestOutput]:
        """Steps the engine until there is news of any of these requests, and takes it.

        Others may be under way: streams left half read, calls from other threads. Their
        news waits for them, and the lock is never held while a caller has the word.

        Returns:
            What is new of each, where `delta`; else the whole of each that has ended.
        """
        with self._lock:
            self._end_left()
            while not (news := self._news & request_ids):
                with _interrupts_later():
                    touched, stopped = self.processor.process(self.engine.step())
                    for request_id, index in stopped:
                        self.engine.abort(request_id, index)
                    self._news.update(touched)
            self._news -= news
            ready = [i for i in news if delta or self.processor.is_finished(i)]
            return [self.processor.output(i, delta=delta) for i in ready]

    def _add(self, encoded: Encoded, params: SamplingParams, options: RequestOptions) -> Request:
        prompt, ids = encoded
        eos = self.engine.model.tokenizer.eos_token_ids
        request = Request(self.new_id(), ids, params, eos, options)
        if (rules := self.engine.grammars.compile(params)) is not None:
            request.rules = rules.result()
        with self._lock:
            self.engine.add(request)
            self.processor.add(request, prompt)
        return request

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Ends what has not ended: now, or where the engine is in use when it next is not.

        The garbage collector may close a forgotten stream in the middle of another call,
        whose thread would wait for itself.
        """
        self._left.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._end_left()
            finally:
                self._lock.release()

    def _end_left(self) -> None:
        """Also takes in a step that was dispatched ahead of the end."""
        engine = self._engine
        if engine is None:
            return
        while self._left:
            request_id = self._left.popleft()
            engine.abort(request_id)
            self.processor.remove(request_id)
            self._news.discard(request_id)
        stats = engine.stats
        while engine.has_work and not (stats().num_running or stats().num_waiting):
            with _interrupts_later():
                engine.step()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Holds Ctrl-C back: in the middle of a step it would leave the engine out of order."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)
