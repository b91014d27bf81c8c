"""Frames: what goes in comes out, and of what strangers send nothing is believed."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.errors import TransferError
from llmjax.transfer.frames import MOST_HEAD, Frames, SharedFrames

KINDS = [Frames, SharedFrames]
DTYPES = [np.uint8, np.float32, ml_dtypes.bfloat16]


@pytest.fixture(params=KINDS)
def pair(request):
    ends = [request.param(sock, 2**16) for sock in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


heads = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4)
arrays = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), min_size=1, max_size=3)
).map(lambda of: np.arange(int(np.prod(of[1]))).astype(of[0]).reshape(of[1]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(frames=st.lists(st.tuples(heads, st.lists(arrays, max_size=3)), min_size=1, max_size=4))
def test_what_is_sent_arrives(kind, frames):
    a, b = (kind(sock, 2**16) for sock in socket.socketpair())
    try:
        for head, body in frames:
            a.send(head, body)
        for head, body in frames:
            got, data = b.receive()
            assert got == head
            assert bytes(data) == b"".join(part.tobytes() for part in body)
    finally:
        a.close()
        b.close()


def test_a_frame_larger_than_any_buffer_arrives(pair):
    a, b = pair
    b._most_body = 2**23
    data = np.random.default_rng(0).bytes(2**23)
    sender = threading.Thread(target=a.send, args=({}, [np.frombuffer(data, np.uint8)]))
    sender.start()
    assert bytes(b.receive()[1]) == data
    sender.join()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=64), st.booleans())
def test_garbage_is_an_error_and_takes_no_memory(kind, data, has_magic):
    left, right = socket.socketpair()
    frames = kind(right, 100)
    try:
        left.sendall(b"ljx1" * has_magic + data)
        left.close()
        with pytest.raises((TransferError, ConnectionError)):
            while True:
                assert isinstance(frames.receive()[0], dict)
    finally:
        frames.close()


@pytest.mark.parametrize("sizes", [(MOST_HEAD + 1, 0), (2, 101)])
def test_sizes_are_bounded_before_anything_is_read(sizes):
    left, right = socket.socketpair()
    frames = Frames(right, 100)
    with left:
        left.sendall(struct.pack(">4sIQ", b"ljx1", *sizes))
        with pytest.raises(TransferError, match="allowed: up to 1048576 and 100"):
            frames.receive()
    frames.close()


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_head_is_a_json_object(text):
    left, right = socket.socketpair()
    frames = Frames(right, 100)
    with left:
        left.sendall(struct.pack(">4sIQ", b"ljx1", len(text), 0) + text)
        with pytest.raises(TransferError, match="head"):
            frames.receive()
    frames.close()


def memory(size, seals):
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.truncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize(
    "files",
    [
        list,
        lambda: [memory(8, 0)],
        lambda: [memory(7, fcntl.F_SEAL_SHRINK)],
        lambda: [os.open("/dev/null", os.O_RDONLY)],
        lambda: [memory(8, fcntl.F_SEAL_SHRINK), memory(8, fcntl.F_SEAL_SHRINK)],
    ],
)
def test_shared_bytes_are_whole_and_stay(files):
    before = open_files()
    left, right = socket.socketpair()
    frames, sent = SharedFrames(right, 100), files()
    with left:
        socket.send_fds(left, [struct.pack(">4sIQ", b"ljx1", 2, 8) + b"{}"], sent)
        with pytest.raises(TransferError, match="file"):
            frames.receive()
    frames.close()
    for file in sent:
        os.close(file)
    assert open_files() == before


def test_no_file_is_left_open():
    before = open_files()
    a, b = (SharedFrames(sock, 2**16) for sock in socket.socketpair())
    for i in range(20):
        a.send({"i": i}, [np.full(1000, i, np.uint8)])
    for i in range(10):
        assert set(b.receive()[1]) == {i}
    a.close()
    b.close()
    assert open_files() == before
