"""Completions of one token, by the thousand: what a server adds to what it computes.

    python docs/benchmarks/one_token.py [--peers-python P] [--vllm-python P]

Serves a small random model (`sides/random_model.py`) with `--api-server-count` 1 and 2, and, where
they are given, by llama.cpp's server and vLLM's; prints a table for docs/benchmarks/one_token.md.
All are loaded at the beginning and stopped but for their turns, of which each has ROUNDS: first
CONNECTIONS clients ask as fast as they are answered, for SECONDS; then requests come evenly, at
half of what was reached and at RATE a second, over as many connections as it takes. Latency
counts from the moment at which a request was due.

Clients are one process that knows just enough of HTTP, so that the machine's time is the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parent))

from compare import LLAMACPP, SIDES, VLLM, VLLM_ENV, Server, all_of
from sides.random_model import CONTEXT, write

CONNECTIONS, SECONDS, ROUNDS, RATE, PORT = 64, 4.0, 3, 500.0, 8840
WORDS, PROMPTS = 8, 4096
CLI = [sys.executable, "-m", "llmjax_serving.cli"]
Address = tuple[str, int]


def request_bytes(rng: random.Random) -> bytes:
    prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=4 * WORDS))
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


class Connection(asyncio.Protocol):
    """Asks one thing at a time."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def to(cls, address: Address) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(cls, *address)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("the server has closed the connection")

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._fail(self._data[:200].decode(errors="replace"))
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._data = b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(None)

    async def ask(self, request: bytes) -> None:
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))


@dataclass
class Clients:
    address: Address
    idle: deque[Connection] = field(default_factory=deque)
    late: list[float] = field(default_factory=list)

    async def ask(self, request: bytes, due: float) -> None:
        """Over a connection that has nothing to do, or a new one."""
        if self.idle:
            connection = self.idle.pop()
        else:
            connection = await Connection.to(self.address)
        try:
            await connection.ask(request)
        except ConnectionError:
            # llama.cpp's server closes connections at will; the request is asked again.
            connection = await Connection.to(self.address)
            await connection.ask(request)
        self.late.append(time.perf_counter() - due)
        self.idle.append(connection)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


async def as_fast_as_answered(address: Address, requests: list[bytes], seconds: float) -> float:
    """Requests a second."""
    clients = Clients(address)
    end = time.perf_counter() + seconds

    async def work(offset: int) -> None:
        number = offset
        while (now := time.perf_counter()) < end:
            await clients.ask(requests[number % len(requests)], now)
            number += CONNECTIONS

    began = time.perf_counter()
    await asyncio.gather(*map(work, range(CONNECTIONS)))
    clients.close()
    return len(clients.late) / (time.perf_counter() - began)


async def evenly(
    address: Address, requests: list[bytes], rate: float, seconds: float
) -> list[float]:
    """Seconds from when each was due until it was answered, in order."""
    clients, loop = Clients(address), asyncio.get_running_loop()
    began, asked = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        asked.append(loop.create_task(clients.ask(requests[number % len(requests)], due)))
    await asyncio.gather(*asked)
    clients.close()
    return sorted(clients.late)


def at(ranked: list[float], share: float) -> float:
    """A nearest-rank percentile in milliseconds."""
    return 1e3 * ranked[math.ceil(share * len(ranked)) - 1]


def turn(server: Server, seed: int, seconds: float) -> dict[str, float]:
    rng = random.Random(seed)
    requests = [request_bytes(rng) for _ in range(PROMPTS)]
    address = "127.0.0.1", server.port
    told = {"rate": asyncio.run(as_fast_as_answered(address, requests, seconds))}
    for name, rate in (("half", told["rate"] / 2), ("fixed", RATE)):
        late = asyncio.run(evenly(address, requests, rate, seconds))
        told |= {f"{name} p50": at(late, 0.5), f"{name} p99": at(late, 0.99)}
    return told


def servers(hub: Path, gguf: Path, args: argparse.Namespace) -> list[Server]:
    made = []
    for number, count in enumerate(args.counts):
        flags = ["--served-model-name", "m", "--no-background", "--log-level", "warning"]
        flags += ["--port", str(PORT + number), "--api-server-count", str(count)]
        made.append(
            Server(
                f"llmjax, {count} frontend{'s' * (count > 1)}",
                [*CLI, "serve", "--model", str(hub), *flags],
                port=PORT + number,
            )
        )
    if args.peers_python:
        port = PORT + 10
        command = [args.peers_python, str(SIDES / "llamacpp_server.py"), str(gguf), str(port), "m"]
        made.append(Server(LLAMACPP, [*command, "64", str(CONTEXT)], port=port))
    if args.vllm_python:
        program = [args.vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", str(hub)]
        for port, count in enumerate(args.counts, PORT + 11):
            flags = ["--served-model-name", "m", "--port", str(port)]
            command = [*program, *flags, "--api-server-count", str(count)]
            made.append(Server(f"{VLLM}, {count}", command, VLLM_ENV, port=port))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-python", help="has llama.cpp's server")
    parser.add_argument("--vllm-python", help="has vLLM")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="of frontends")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load [%(default)s]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="[%(default)s]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = servers(*write(Path(folder)), args)
        turns: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
        with all_of(sides):
            for number in range(args.rounds + 1):
                for side in sides:
                    with side.awake():
                        told = turn(side, number, args.seconds if number else 1.0)
                    if number:  # the first does not count
                        turns[side.name].append(told)
                print(f"  round {number} of {args.rounds}", flush=True)
    print(f"| | requests/s | at half of it, p50 | p99 | at {RATE:.0f} a second, p50 | p99 |")
    print("| :-- | --: | --: | --: | --: | --: |")
    for name, runs in turns.items():
        rate, *times = (median(run[what] for run in runs) for what in runs[0])
        print(f"| {name} | {rate:,.0f} |", " | ".join(f"{ms:,.1f} ms" for ms in times), "|")


if __name__ == "__main__":
    main()
