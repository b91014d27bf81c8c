"""Engines in other processes, as the prefill worker sees them."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from ..errors import TransferError
from .connector import Deliver, Result, Terms
from .link import Link, ended
from .messages import HELLO_SECONDS, greet, read_request
from .sockets import Address

log = logging.getLogger(__name__)

MOST_GUESTS = 64
_LOOK_SECONDS = 0.2


class Listener:
    """Takes connections, and hands on what comes over them.

    Args:
        sock: that `address` listens on.
        deliver: told what each guest says, and, with None, that it has gone.
    """

    def __init__(self, address: Address, sock: socket.socket, terms: Terms, deliver: Deliver):
        self._where = address
        self._sock = sock
        self._terms = terms
        self._deliver = deliver
        self._guests: set[SocketGuest] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        sock.settimeout(_LOOK_SECONDS)
        self._thread = threading.Thread(target=self._accept, name="llmjax-listen", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """With the port that was found, where any was asked for."""
        if self._where.kind == "tcp":
            return str(self._where._replace(port=self._sock.getsockname()[1]))
        return str(self._where)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._sock.close()
        with self._lock:
            guests = list(self._guests)
        for guest in guests:
            guest.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError as error:
                log.warning("a connection could not be taken: %s", error)
                self._stopping.wait(_LOOK_SECONDS)
                continue
            with self._lock:
                is_full = len(self._guests) >= MOST_GUESTS
                if not is_full:
                    self._guests.add(SocketGuest(self, sock))
            if is_full:
                log.warning("a connection was refused: %d are open already", MOST_GUESTS)
                sock.close()

    def forget(self, guest: SocketGuest) -> None:
        with self._lock:
            self._guests.discard(guest)


class SocketGuest:
    """One connection: a `Guest`."""

    def __init__(self, listener: Listener, sock: socket.socket):
        self._listener = listener
        self._sock = sock
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name="llmjax-guest", daemon=True)
        self._thread.start()

    def reply(self, result: Result) -> None:
        if (link := self._link) is not None:
            link.send(result)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        listener = self._listener
        where, terms, name = listener._where, listener._terms, _name(self._sock)
        try:
            self._sock.settimeout(HELLO_SECONDS)
            frames = where.frames(where.accepted(self._sock), 4 * terms.most_tokens)
            greet(frames, terms, f"the engine at {name}")
            self._link = Link(frames)
            log.info("%s is there", name)
            while True:
                listener._deliver(self, read_request(*frames.receive()))
        except (OSError, TransferError) as error:
            level = logging.WARNING if isinstance(error, TransferError) else logging.INFO
            log.log(level, "%s has gone: %s", name, ended(error))
        finally:
            if (link := self._link) is not None:
                self._link = None
                link.close()
                listener._deliver(self, None)
            self._sock.close()
            listener.forget(self)


def _name(sock: socket.socket) -> str:
    try:
        peer = sock.getpeername()
    except OSError:
        return "somebody"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process of this machine"
