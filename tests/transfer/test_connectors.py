"""Both ends of a connection, with a worker made of numbers."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from queue import SimpleQueue

import ml_dtypes
import numpy as np
import pytest

from llmjax.errors import ConfigError, PrefillMismatchError
from llmjax.transfer.client import SocketConnector
from llmjax.transfer.connector import Cancel, Failure, Job, Pages, Part, Place, Terms
from llmjax.transfer.frames import Frames
from llmjax.transfer.messages import PROTOCOL
from llmjax.transfer.server import Listener
from llmjax.transfer.sockets import Address

ARRAYS = (((2, 3), np.dtype(ml_dtypes.bfloat16)), ((4,), np.dtype(np.uint8)))
TERMS = Terms({"model": "m", "windows": [None, 6], "page size": 4}, ARRAYS, 1000)
ADDRESSES = ["tcp://127.0.0.1:0", "shm://test-connectors"]


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class Worker:
    """Answers by `answer(job)`, or keeps silent where that is None."""

    def __init__(self, address, terms=TERMS, answer=None):
        self.told = SimpleQueue()
        self.guests = []
        self.answer = answer
        where = Address.of(address)
        self.listener = Listener(where, where.listen(), terms, self.deliver)
        self.address = self.listener.address

    def deliver(self, guest, message):
        self.told.put(message)
        self.guests.append(guest)
        if self.answer and isinstance(message, Job):
            guest.reply(self.answer(message))

    def close(self):
        self.listener.close()


class Engine:
    """Who asks; `results` are those that came."""

    def __init__(self, address, terms=TERMS):
        self.news = threading.Event()
        self.connector = SocketConnector(Address.of(address), terms, self.news.set)
        self.results = []

    def wait(self, count):
        until(lambda: self.results.extend(self.connector.receive()) or len(self.results) >= count)
        return self.results

    def close(self):
        self.connector.close()


def pages(job, count=37):
    """Places and contents that depend on the job."""
    rng = np.random.default_rng(job.id)
    places = [Place(i % 2, job.start + i // 2) for i in range(count)]
    parts = []
    for i in range(0, count, 16):
        rows = [rng.integers(0, 100, (16, *shape)).astype(dtype) for shape, dtype in ARRAYS]
        parts.append(Part(places[i : i + 16], rows))
    return Pages(job.id, parts, 8)


def contents(result):
    return {
        place: tuple(np.asarray(row[i]).tobytes() for row in part.rows)
        for part in result.parts
        for i, place in enumerate(part.places)
    }


@pytest.fixture(params=ADDRESSES)
def ends(request):
    with closing(Worker(request.param)) as worker, closing(Engine(worker.address)) as engine:
        yield worker, engine


@pytest.mark.parametrize("salt", [None, "s"])
def test_jobs_go_there_and_pages_come_back(ends, salt):
    worker, engine = ends
    worker.answer = pages
    jobs = [Job(i, list(range(i, i + 200)), i, salt) for i in range(5)]
    for job in jobs:
        engine.connector.send(job)
    results = engine.wait(5)
    assert [worker.told.get() for _ in jobs] == jobs
    for job, result in zip(jobs, results, strict=True):
        assert (result.job_id, result.num_cached) == (job.id, 8)
        assert contents(result) == contents(pages(job))


def test_failures_come_back_too(ends):
    worker, engine = ends
    worker.answer = lambda job: Failure(job.id, "too long")
    engine.connector.send(Job(7, [1]))
    assert engine.wait(1) == [Failure(7, "too long")]


def test_what_is_cancelled_is_told_and_has_no_result(ends):
    worker, engine = ends
    engine.connector.send(Job(1, [1] * 90))
    engine.connector.send(Job(2, [1] * 90))
    until(lambda: len(worker.guests) == 2)
    engine.connector.cancel(1)
    until(lambda: len(worker.guests) == 3)
    assert [worker.told.get() for _ in range(3)][2] == Cancel(1)
    guest = worker.guests[0]
    guest.reply(pages(Job(1, []), 33))
    guest.reply(pages(Job(2, []), 33))
    assert [result.job_id for result in engine.wait(1)] == [2]
    assert not engine.connector._parts and not engine.connector._open


def test_a_worker_that_dies_fails_its_jobs_and_may_come_back(ends):
    worker, engine = ends
    engine.connector.send(Job(1, [1]))
    until(lambda: worker.guests)
    address = worker.address
    worker.close()
    assert engine.wait(1) == [Failure(1, "the worker was lost")]
    until(lambda: not engine.connector.is_up)
    engine.connector.send(Job(2, [1]))
    assert engine.wait(2)[1] == Failure(2, "the worker is gone")
    with closing(Worker(address, answer=pages)):
        until(lambda: engine.connector.is_up)
        engine.connector.send(Job(3, [1] * 90))
        assert engine.wait(3)[2].job_id == 3


def test_a_worker_hears_that_an_engine_has_gone(ends):
    worker, engine = ends
    engine.connector.send(Job(1, [1]))
    until(lambda: worker.guests)
    engine.close()
    until(lambda: len(worker.guests) == 2)
    assert [worker.told.get() for _ in range(2)] == [Job(1, [1]), None]
    worker.guests[0].reply(Failure(1, "nobody reads this"))
    until(lambda: not worker.listener._guests)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_worker_may_come_later(address, caplog):
    if address.startswith("tcp"):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    with closing(Engine(address)) as engine:
        assert not engine.connector.is_up
        assert f"no prefill worker answers at {address}" in caplog.text
        with closing(Worker(address, answer=pages)):
            until(lambda: engine.connector.is_up)
            engine.connector.send(Job(3, [1] * 90))
            assert engine.wait(1)[0].job_id == 3


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "other", "model: .* has 'other', and this engine 'm'"),
        ("page size", 8, "page size: .* has 8, and this engine 4"),
        ("KV cache dtype", "int8", "KV cache dtype: .* has 'int8', and this engine None"),
    ],
)
def test_another_model_or_another_layout_is_refused(address, name, value, message):
    theirs = replace(TERMS, values={**TERMS.values, name: value})
    with closing(Worker(address, theirs)) as worker:
        with pytest.raises(PrefillMismatchError, match=message) as refused:
            Engine(worker.address)
        ours = TERMS.values.get(name)
        assert (refused.value.name, refused.value.ours, refused.value.theirs) == (name, ours, value)
        until(lambda: not worker.listener._guests)
        with closing(Engine(worker.address, theirs)) as engine:
            assert engine.connector.is_up


def frame(text, body=b""):
    return struct.pack(">4sIQ", b"ljx1", len(text), len(body)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        frame(b"{}"),
        frame(b'{"type":"hello","protocol":99,"terms":{}}'),
        frame(b'{"type":"hello","protocol":1,"terms":[]}'),
    ],
)
def test_a_worker_lives_through_strangers(data):
    with closing(Worker(ADDRESSES[0], answer=pages)) as worker:
        where = Address.of(worker.address)
        with socket.create_connection((where.host, where.port)) as sock:
            sock.sendall(data)
            sock.settimeout(20)
            with suppress(ConnectionResetError):
                while sock.recv(1000):
                    pass
        with closing(Engine(worker.address)) as engine:
            engine.connector.send(Job(1, [1] * 90))
            assert engine.wait(1)[0].job_id == 1
        assert worker.told.get() == Job(1, [1] * 90)


@pytest.mark.parametrize(
    "data",
    [
        frame(b'{"type":"job","id":-1,"start":0,"salt":null}', b"1234"),
        frame(b'{"type":"job","id":1,"start":true,"salt":null}', b"1234"),
        frame(b'{"type":"job","id":1,"start":0,"salt":7}', b"1234"),
        frame(b'{"type":"job","id":1,"start":0,"salt":null}', b"123"),
        frame(b'{"type":"eval","id":1}'),
    ],
)
def test_jobs_that_make_no_sense_end_the_connection(data):
    with closing(Worker(ADDRESSES[0])) as worker, closing(Engine(worker.address)) as engine:
        engine.connector._link.frames.sock.sendall(data)
        until(lambda: worker.guests)
        assert worker.told.get() is None


class Impostor:
    """Says hello as a worker does, and answers the first job with what it was given."""

    def __init__(self, data):
        self._server = socket.create_server(("127.0.0.1", 0))
        self._data = data
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        try:
            while True:
                sock, _ = self._server.accept()
                with sock:
                    frames = Frames(sock, 10_000)
                    hello = {"protocol": PROTOCOL, "terms": TERMS.values, "most_tokens": 1000}
                    frames.send({"type": "hello", **hello})
                    frames.receive()
                    frames.receive()
                    sock.sendall(self._data)
                    sock.recv(1000)
        except OSError:
            pass

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


def said(places, last="true", size=16, **more):
    extra = "".join(f',"{k}":{v}' for k, v in {"id": 1, "cached": 0, **more}.items())
    text = f'{{"type":"pages","places":{places},"last":{last}{extra}}}'.encode()
    return frame(text, b"x" * size)


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        frame(b'{"type":"hello"}'),
        said("[[0,1]]", size=15),
        said("[[0,1]]", size=160),
        said("[[0,1],[0,1]]", size=32),
        said("[[2,1]]"),
        said("[[0,0]]"),
        said("[[0,5]]"),
        said("[[0,-1]]"),
        said("[[0]]"),
        said("7"),
        said("[[0,1]]", last="1"),
        said("[[0,1]]", cached="-1"),
        said("[[0,1]]", last="false") * 2,
        said(str([[0, 1]] * 17), size=17 * 16),
    ],
)
def test_pages_that_make_no_sense_fail_the_job(data):
    with closing(Impostor(data)) as worker, closing(Engine(worker.address)) as engine:
        engine.connector.send(Job(1, [5] * 21, start=1))
        assert engine.wait(1) == [Failure(1, "the worker was lost")]
        assert not engine.connector._parts


def test_pages_that_make_sense_do_not():
    data = said("[[0,1]]", last="false") + said("[[1,4]]")
    with closing(Impostor(data)) as worker, closing(Engine(worker.address)) as engine:
        engine.connector.send(Job(1, [5] * 21, start=1))
        (result,) = engine.wait(1)
        assert list(contents(result)) == [(0, 1), (1, 4)]


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://h", "tcp://h:99999", "http://h:1", "shm://", "shm://a/b", "mem"]
)
def test_addresses_that_are_none(text):
    with pytest.raises(ConfigError, match="allowed: tcp://HOST:PORT"):
        Address.of(text)


@pytest.mark.parametrize("text", ["tcp://h:1", "tcp://[::1]:9000", "shm://a.b-c_1", "memory"])
def test_addresses_are_said_as_they_are_read(text):
    assert str(Address.of(text)) == text


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_taken_once(address):
    with closing(Worker(address)) as worker, pytest.raises(ConfigError, match="cannot listen on"):
        Address.of(worker.address).listen()
