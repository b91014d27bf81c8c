"""A prefill worker in another process, as the engine that decodes sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..errors import PrefillMismatchError, TransferError
from .connector import PART_PAGES, Cancel, Connector, Job, Pages, Part, Terms
from .frames import Frames
from .link import Link, ended
from .messages import greet, read_failure, read_part
from .sockets import Address

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
"""Seconds between two attempts to reach a worker."""


class SocketConnector(Connector):
    """Reaches the worker at an address, again where it was lost.

    Raises:
        PrefillMismatchError: the worker is there, but its pages are of no use here.
    """

    def __init__(self, address: Address, terms: Terms, on_news: Callable[[], None]):
        super().__init__(str(address), on_news)
        self._where = address
        self._terms = terms
        self._link: Link | None = None
        self._most_tokens = 0
        self._parts: dict[int, list[Part]] = {}
        self._stopping = threading.Event()
        frames: Frames | None = None
        try:
            frames = self._dial()
        except PrefillMismatchError:
            raise
        except (OSError, TransferError) as error:
            log.warning(
                "no prefill worker answers at %s: %s; prompts are computed here until one does",
                address,
                ended(error),
            )
        link = self._begin(frames) if frames is not None else None
        self._thread = threading.Thread(
            target=self._run, args=(link,), name="llmjax-prefill", daemon=True
        )
        self._thread.start()

    @property
    def is_up(self) -> bool:
        return self._link is not None

    @property
    def most_tokens(self) -> int:
        return self._most_tokens

    def close(self) -> None:
        self._stopping.set()
        if (link := self._link) is not None:
            link.shut_down()
        self._thread.join()

    def _carry(self, message: Job | Cancel) -> bool:
        if (link := self._link) is None:
            return False
        link.send(message)
        return True

    def _dial(self) -> Frames:
        sock = self._where.dial()
        frames = self._where.frames(sock, PART_PAGES * self._terms.page_bytes)
        try:
            self._most_tokens = greet(frames, self._terms, f"the prefill worker at {self.address}")
        except BaseException:
            frames.close()
            raise
        return frames

    def _begin(self, frames: Frames) -> Link:
        link = Link(frames)
        self._link = link
        return link

    def _run(self, link: Link | None) -> None:
        while not self._stopping.is_set():
            link = link or self._reach()
            if link is None:
                return
            reason = self._listen(link)
            link = None
            if not self._stopping.is_set():
                log.warning(
                    "the prefill worker at %s is lost: %s; prompts are computed here until it is "
                    "back",
                    self.address,
                    reason,
                )

    def _reach(self) -> Link | None:
        """Dials until somebody answers; None where this is closed first."""
        pause, told = _FIRST_PAUSE, ""
        while not self._stopping.wait(pause):
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                frames = self._dial()
            except PrefillMismatchError as error:
                if told != str(error):
                    log.warning("%s", error)
                told = str(error)
            except (OSError, TransferError) as error:
                log.debug("no prefill worker at %s: %s", self.address, ended(error))
            else:
                log.info("the prefill worker at %s is there", self.address)
                return self._begin(frames)
        return None

    def _listen(self, link: Link) -> str:
        """Takes in what comes until the connection ends; returns why it did."""
        try:
            if self._stopping.is_set():
                return "closed"
            while True:
                self._take(*link.frames.receive())
        except (OSError, TransferError) as error:
            return ended(error)
        finally:
            self._link = None
            link.close()
            self._parts.clear()
            self._fail_all("the worker was lost")

    def _take(self, head: dict[str, Any], body: memoryview) -> None:
        if head.get("type") == "failure":
            failure = read_failure(head)
            self._parts.pop(failure.job_id, None)
            self._deliver(failure)
            return
        if head.get("type") != "pages":
            raise TransferError(f"a frame of the type {head.get('type')!r}")
        part, num_cached, is_last = read_part(head, body, self._terms)
        job_id = head.get("id")
        with self._lock:
            job = self._open.get(job_id) if isinstance(job_id, int) else None
        if job is None:  # it was cancelled while they were on their way
            self._parts.pop(job_id, None)  # type: ignore[arg-type]
            return
        parts = self._parts.setdefault(job.id, [])
        parts.append(part)
        self._check_size(job, parts)
        if is_last:
            del self._parts[job.id]
            self._deliver(Pages(job.id, parts, min(num_cached, len(job.token_ids))))

    def _check_size(self, job: Job, parts: list[Part]) -> None:
        places = [place for part in parts for place in part.places]
        groups, size = len(self._terms.values["windows"]), self._terms.values["page size"]
        blocks = len(job.token_ids) // size
        fits = all(g < groups and job.start <= b < blocks for g, b in places)
        if not fits or len(set(places)) != len(places):
            raise TransferError("pages came that were not asked for")
