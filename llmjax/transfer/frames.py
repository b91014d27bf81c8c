"""Messages over a stream socket: a JSON object each, and bytes, in the stream or beside it.

Nothing that comes is trusted: sizes are bounded before memory is taken, and what is not as it
should be is a `TransferError`.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import TransferError

_PREFIX = struct.Struct(">4sIQ")
_MAGIC = b"ljx1"
MOST_HEAD = 2**20
"""Bytes of a JSON object."""


class Frames:
    """A frame is a magic word, the sizes of both parts, the object, and the bytes.

    One thread may send while another receives.

    Args:
        most_body: bytes that may come with an object.
    """

    def __init__(self, sock: socket.socket, most_body: int):
        self.sock = sock
        self._most_body = most_body

    def send(self, head: dict[str, Any], body: Iterable[Any] = ()) -> None:
        """Sends an object, and arrays one behind the other.

        Raises:
            OSError: the connection has ended.
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        parts = [_bytes_of(part) for part in body]
        size = sum(map(len, parts))
        self._send(_PREFIX.pack(_MAGIC, len(text), size) + text, parts, size)

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """The next object, and its bytes.

        Raises:
            OSError: the connection has ended.
            TransferError: what came is no frame.
        """
        magic, length, size = _PREFIX.unpack(self._receive_prefix(_PREFIX.size))
        if magic != _MAGIC:
            raise TransferError(f"a frame begins with {magic!r}, allowed: {_MAGIC!r}")
        if length > MOST_HEAD or size > self._most_body:
            raise TransferError(
                f"a frame of {length} and {size} bytes, allowed: up to {MOST_HEAD} and "
                f"{self._most_body}"
            )
        text = bytes(self._receive(length))
        try:
            head = json.loads(text)
        except ValueError as error:
            raise TransferError(f"a frame's head is not JSON: {error}") from error
        except RecursionError as error:
            raise TransferError("a frame's head is nested too deeply") from error
        if not isinstance(head, dict):
            raise TransferError("a frame's head is not a JSON object")
        return head, self._receive_body(size)

    def shut_down(self) -> None:
        """Ends the connection for both, and for threads that wait here."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self.sock.close()

    def _send(self, head: bytes, parts: list[memoryview], size: int) -> None:
        self.sock.sendall(head)
        for part in parts:
            self.sock.sendall(part)

    def _receive_prefix(self, size: int) -> memoryview:
        return self._receive(size)

    def _receive_body(self, size: int) -> memoryview:
        return self._receive(size)

    def _receive(self, size: int) -> memoryview:
        view = memoryview(bytearray(size))
        got = 0
        while got < size:
            count = self.sock.recv_into(view[got:])
            if not count:
                raise ConnectionError("the other side has closed the connection")
            got += count
        return view


class SharedFrames(Frames):
    """Over a socket of this machine: the bytes are in memory that both sides map.

    Each body is a memory file without a name, which goes along as a descriptor: the kernel
    frees it with its last holder, whoever dies when.
    """

    def __init__(self, sock: socket.socket, most_body: int):
        super().__init__(sock, most_body)
        self._file: int | None = None

    def close(self) -> None:
        super().close()
        self._drop_file()

    def _send(self, head: bytes, parts: list[memoryview], size: int) -> None:
        if not size:
            self.sock.sendall(head)
            return
        file = os.memfd_create("llmjax-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for part in parts:
                _write(file, part)
            # The reader maps it: a file that shrinks would end its process.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            sent = socket.send_fds(self.sock, [head], [file])
        finally:
            os.close(file)
        self.sock.sendall(head[sent:])

    def _receive_prefix(self, size: int) -> memoryview:
        self._drop_file()
        data, files = b"", []
        try:
            while len(data) < size:
                more, fds, _, _ = socket.recv_fds(self.sock, size - len(data), 2)
                files += fds
                if not more:
                    raise ConnectionError("the other side has closed the connection")
                data += more
            if len(files) > 1:
                raise TransferError("a frame came with several files, allowed: one")
        except BaseException:
            for file in files:
                os.close(file)
            raise
        self._file = files[0] if files else None
        return memoryview(data)

    def _receive_body(self, size: int) -> memoryview:
        try:
            if not size:
                return memoryview(b"")
            if self._file is None:
                raise TransferError("a frame came without the file that holds its bytes")
            return _map(self._file, size)
        finally:
            self._drop_file()

    def _drop_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


def _bytes_of(part: Any) -> memoryview:
    # Of types that Python does not know, such as bfloat16, there is no view but of their bytes.
    flat = np.ascontiguousarray(np.asarray(part)).reshape(-1).view(np.uint8)
    return memoryview(flat)  # type: ignore[arg-type]


def _write(file: int, left: memoryview) -> None:
    while left:
        left = left[os.write(file, left) :]


def _map(file: int, size: int) -> memoryview:
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(file).st_size != size:
            raise TransferError(f"the file of a frame is not {size} bytes that stay")
        return memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
    except OSError as error:
        raise TransferError(f"the file of a frame cannot be mapped: {error}") from error
