"""One connection at work: a thread sends, the caller's receives."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

from .connector import Cancel, Job, Result
from .frames import Frames
from .messages import frames_of

log = logging.getLogger(__name__)


class Link:
    """Sends messages in order without ever making the sender wait.

    What queues up is bounded by who asks: a worker sends what it was asked for, and an engine
    asks for no more pages than it has room for.
    """

    def __init__(self, frames: Frames):
        self.frames = frames
        self._outbox: SimpleQueue[Job | Cancel | Result | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="llmjax-send", daemon=True)
        self._sender.start()

    def send(self, message: Job | Cancel | Result) -> None:
        self._outbox.put(message)

    def shut_down(self) -> None:
        """Ends the connection; whoever receives finds out."""
        self.frames.shut_down()

    def close(self) -> None:
        """Ends it and waits for its thread."""
        self.frames.shut_down()
        self._outbox.put(None)
        self._sender.join()
        self.frames.close()

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                for head, body in frames_of(message):
                    self.frames.send(head, body)
            except OSError:
                return self.frames.shut_down()
            except Exception:
                log.exception("a message could not be sent")
                return self.frames.shut_down()
        return None


def ended(error: Exception) -> str:
    """Why a connection has ended, for people."""
    return str(error) or type(error).__name__
