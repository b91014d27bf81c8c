"""Sockets by address: tcp://HOST:PORT over a network, shm://NAME within a machine."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from ..config import PREFILL_ADDRESS
from ..errors import ConfigError
from .frames import Frames, SharedFrames

DIAL_SECONDS = 5.0
_IDLE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When a silent host is asked whether it is still there, and given up, where the system can."""


class Address(NamedTuple):
    """Where a prefill worker listens."""

    kind: str
    host: str = ""
    port: int = 0
    name: str = ""

    def __str__(self) -> str:
        if self.kind == "tcp":
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"tcp://{host}:{self.port}"
        return f"shm://{self.name}" if self.kind == "shm" else self.kind

    @classmethod
    def of(cls, text: str) -> Address:
        """Reads what `PrefillConfig` allows.

        Raises:
            ConfigError: it is none of that.
        """
        match = PREFILL_ADDRESS.fullmatch(text)
        if match is None or int(match["port"] or 0) > 65535:
            raise ConfigError(
                f"the address of a prefill worker is {text!r}, allowed: tcp://HOST:PORT, "
                "shm://NAME or memory"
            )
        if text == "memory":
            return cls("memory")
        if match["name"]:
            if not (hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")):
                raise ConfigError(f"{text}: shared memory between processes works on Linux only")
            return cls("shm", name=match["name"])
        return cls("tcp", match["host"].strip("[]"), int(match["port"]))

    @property
    def _abstract(self) -> bytes:
        """Of a socket without a file, which nobody has to remove."""
        return b"\0llmjax-prefill-" + self.name.encode()

    def dial(self) -> socket.socket:
        """A connection. Raises OSError where nobody listens."""
        if self.kind == "tcp":
            sock = socket.create_connection((self.host, self.port), DIAL_SECONDS)
            return _tuned(sock)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(DIAL_SECONDS)
            sock.connect(self._abstract)
            _check_user(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def listen(self) -> socket.socket:
        """A socket that takes connections. Raises ConfigError where the address cannot be had."""
        try:
            if self.kind == "tcp":
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                return socket.create_server((self.host, self.port), family=family, backlog=16)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(self._abstract)
                sock.listen(16)
            except BaseException:
                sock.close()
                raise
            return sock
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {self}: {error}") from error

    def accepted(self, sock: socket.socket) -> socket.socket:
        """A connection that was taken, once it may be used. Raises OSError where it may not."""
        if self.kind == "tcp":
            return _tuned(sock)
        _check_user(sock)
        return sock

    def frames(self, sock: socket.socket, most_body: int) -> Frames:
        return (Frames if self.kind == "tcp" else SharedFrames)(sock, most_body)


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _IDLE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def _check_user(sock: socket.socket) -> None:
    """A socket without a file has no permissions either: only our own user may be behind it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise PermissionError(f"the other side runs as user {user}, and not as {os.getuid()}")
