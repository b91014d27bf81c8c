"""A prefill worker in the same process: nothing is copied but from and to the devices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .connector import Cancel, Connector, Deliver, Job, Pages, Part, Result


class MemoryConnector(Connector):
    """Both ends at once: a `Connector` for the engine, and a `Guest` for the worker.

    Args:
        deliver: the worker's.
        end: ends the worker, and returns once it has ended.
    """

    def __init__(
        self,
        deliver: Deliver,
        most_tokens: int,
        on_news: Callable[[], None],
        end: Callable[[], None],
    ):
        super().__init__("memory", on_news)
        self._tell = deliver
        self._most_tokens = most_tokens
        self._end = end
        self._is_up = True
        # Fetching pages waits for the device, and neither engine should.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="llmjax-pages")

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def most_tokens(self) -> int:
        return self._most_tokens

    def close(self) -> None:
        self._end()
        self.dismiss("closed")
        self._fetcher.shutdown()

    def _carry(self, message: Job | Cancel) -> bool:
        if not self._is_up:
            return False
        self._tell(self, message)
        return True

    def reply(self, result: Result) -> None:
        if isinstance(result, Pages):
            self._fetcher.submit(self._fetch, result)
        else:
            self._deliver(result)

    def dismiss(self, reason: str) -> None:
        self._is_up = False
        self._fail_all(reason)

    def _fetch(self, pages: Pages) -> None:
        parts = [Part(places, [np.asarray(row) for row in rows]) for places, rows in pages.parts]
        self._deliver(Pages(pages.job_id, parts, pages.num_cached))
