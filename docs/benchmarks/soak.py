"""A server under clients of every sort for a long time: `python docs/benchmarks/soak.py`.

Serves MODEL (--model) in a pool that is too small for what is asked of it, and keeps CLIENTS busy
for --minutes (30): some read their answers, whole or streamed, some ask what makes no sense, go
away, read slowly, or not at all. Then all stop, and the pool must be free. Prints a line every ten
seconds and a summary as JSON; the exit status is 0 where

- the server's memory is within GROWTH of what it was after the warm-up (a fifth of the time),
- every answer is of a kind that was to be expected, and came within STUCK seconds,
- nothing runs, waits or holds a page at the end, and the server stops by itself with status 0.

For docs/benchmarks/soak.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp
import psutil

GROWTH, STUCK, SAMPLE = 0.05, 600.0, 10.0
CLIENTS, WARM_SHARE, MODEL = 64, 0.2, "model"
QUEUE, PAGES, CONTEXT, TIMEOUT = 24, 900, 1024, 8
"""Requests that may wait, pages of the pool, tokens, and seconds that clients may stand still."""
WORDS = "a river runs under the old stone bridge while geese look on and say nothing at all"
WALL = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "why": {"type": "string"}},
}
BUSY = (429, 503)
ENDS = (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.incomplete"')
"""One of these is in the last line of a stream that has ended well."""


@dataclass
class Soak:
    """Attributes:
    url: of the server.
    outcomes: how often each sort of client ended how.
    odd: what was not to be expected, in words.
    ends_at: when clients stop, by the monotonic clock.
    """

    url: str
    session: aiohttp.ClientSession
    model: str
    ends_at: float
    outcomes: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)

    def note(self, sort: str, outcome: str) -> None:
        self.outcomes[f"{sort}: {outcome}"] += 1

    def complain(self, sort: str, what: str) -> None:
        self.note(sort, "ODD")
        self.odd.append(f"{sort}: {what[:300]}")


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(1, most)))


def question(rng: random.Random, soak: Soak) -> tuple[str, dict[str, Any]]:
    """A path and a body that make sense."""
    common = {"model": soak.model, "max_tokens": rng.choice((4, 16, 64, 200))}
    text = words(rng, rng.choice((8, 60, 400)))
    kind = rng.randrange(6)
    if kind == 0:
        more = rng.choice(({"n": 3}, {"logprobs": 3}, {"echo": True}, {"stop": ["e"]}, {"seed": 1}))
        return "/v1/completions", {**common, "prompt": text, **more}
    said = [{"role": "user", "content": text}]
    if kind == 1:
        return "/v1/messages", {**common, "messages": said}
    if kind == 2:
        del common["max_tokens"]
        return "/v1/responses", {**common, "input": text, "max_output_tokens": 32}
    more: dict[str, Any] = {}
    if kind == 3:
        more = {"response_format": {"type": "json_schema", "json_schema": {"schema": WALL}}}
    if kind == 4:
        function = {"name": "paint", "parameters": WALL}
        more = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    return "/v1/chat/completions", {**common, "messages": said, **more}


async def whole(soak: Soak, rng: random.Random) -> None:
    path, body = question(rng, soak)
    async with soak.session.post(soak.url + path, json=body) as response:
        answer = await response.json()
    if response.status in BUSY:
        await turned_away(soak, "whole", response)
    elif response.status != 200 or not answer.get("usage"):
        soak.complain("whole", f"{path} {response.status} {answer}")
    else:
        soak.note("whole", "answered")


async def streamed(soak: Soak, rng: random.Random, pause: float = 0.0) -> None:
    """Reads a stream to its end, slowly where `pause` seconds are between its pieces."""
    sort, last = "slow" if pause else "streamed", b""
    path, body = question(rng, soak)
    async with soak.session.post(soak.url + path, json={**body, "stream": True}) as response:
        async for line in response.content:
            last = line if line.strip() else last
            await asyncio.sleep(pause)
    if response.status in BUSY:
        await turned_away(soak, sort, response)
        return
    if response.status != 200 or not any(end in last for end in ENDS):
        soak.complain(sort, f"{path} {response.status} ends with {last!r}")
    else:
        soak.note(sort, "answered")


async def slow(soak: Soak, rng: random.Random) -> None:
    await streamed(soak, rng, pause=rng.choice((0.02, 0.1)))


async def turned_away(soak: Soak, sort: str, response: aiohttp.ClientResponse) -> None:
    """Waits a little, as a client does that is told when to come back."""
    if "Retry-After" not in response.headers:
        soak.complain(sort, f"{response.status} without Retry-After")
    soak.note(sort, "turned away")
    await asyncio.sleep(min(1.0, float(response.headers.get("Retry-After", 1))))


async def leaving(soak: Soak, rng: random.Random) -> None:
    """Goes away, before the answer or within it."""
    path, body = question(rng, soak)
    body["stream"] = rng.random() < 0.6
    patience = rng.choice((0.001, 0.05, 0.5, 2.0))
    with suppress(TimeoutError):
        async with asyncio.timeout(patience), soak.session.post(soak.url + path, json=body) as it:
            async for _ in it.content:
                pass
    soak.note("leaving", "left")


async def senseless(soak: Soak, rng: random.Random) -> None:
    """Asks for what is refused; to be told so is all it wants."""
    path, body = question(rng, soak)
    wrong: list[Any] = [
        json.dumps(body)[:-5],
        "[" * 5000,
        json.dumps({**body, "model": "other"}),
        json.dumps({**body, "colour": "red"}),
        json.dumps({**body, "temperature": 99}),
        json.dumps({**body, "messages": [], "prompt": [], "input": []}),
        json.dumps({"model": soak.model, "prompt": words(rng, 10) * 2000, "max_tokens": 4}),
        b"\xff\xfe" * 400,
    ]
    data = rng.choice(wrong)
    head = {"Content-Type": "application/json"}
    async with soak.session.post(soak.url + path, data=data, headers=head) as response:
        text = await response.text()
    if 400 <= response.status < 500:
        soak.note("senseless", "refused")
    else:
        soak.complain("senseless", f"{path} {data[:80]!r} {response.status} {text}")


async def silent(soak: Soak, rng: random.Random) -> None:
    """Sends a half of a request, or reads nothing of an answer, until it is cut off."""
    host, port = soak.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    path, body = question(rng, soak)
    payload = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    sent = head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload
    writer.write(sent[: rng.choice((30, len(sent) - 5, len(sent)))])
    await asyncio.sleep(rng.uniform(0, 2 * TIMEOUT))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    soak.note("silent", "left")


async def looking(soak: Soak, rng: random.Random) -> None:
    """Asks what costs no tokens."""
    path = rng.choice(("/health", "/metrics", "/v1/models", "/load", "/version", "/openapi.json"))
    async with soak.session.get(soak.url + path) as response:
        await response.read()
    if response.status != 200:
        soak.complain("looking", f"{path} {response.status}")
    else:
        soak.note("looking", "answered")


Sort = Callable[[Soak, random.Random], Awaitable[None]]
SORTS: list[tuple[Sort, float]] = [
    *((whole, 4.0), (streamed, 4.0), (slow, 1.0), (leaving, 3.0)),
    *((senseless, 2.0), (silent, 0.7), (looking, 1.0)),
]


async def client(soak: Soak, number: int) -> None:
    """One after another of all sorts, until it is time to stop."""
    rng = random.Random(number)
    sorts, weights = zip(*SORTS, strict=True)
    while time.monotonic() < soak.ends_at:
        (sort,) = rng.choices(sorts, weights)
        try:
            await asyncio.wait_for(sort(soak, rng), STUCK)
        except TimeoutError:
            soak.complain(sort.__name__, f"stuck for {STUCK:.0f} s")
        except (OSError, aiohttp.ClientError) as error:
            soak.complain(sort.__name__, f"{type(error).__name__}: {error}")


async def gauges(soak: Soak) -> dict[str, int]:
    async with soak.session.get(soak.url + "/metrics") as response:
        text = await response.text()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_pages_used")
    names += ("kv_cache_pages_cached", "kv_cache_pages_free", "num_preemptions_total")
    found = {}
    for name in names:
        line = next(one for one in text.splitlines() if one.startswith(f"llmjax:{name}{{"))
        found[name] = int(float(line.rsplit(" ", 1)[1]))
    return found


def resident(process: psutil.Process) -> float:
    """MiB of a process and its children."""
    return sum(one.memory_info().rss for one in (process, *process.children(True))) / 2**20


async def watch(soak: Soak, process: psutil.Process, began: float) -> list[tuple[float, float]]:
    """Seconds since the start and MiB, until clients stop."""
    samples = []
    while time.monotonic() < soak.ends_at:
        samples.append((time.monotonic() - began, resident(process)))
        now = await gauges(soak)
        done = sum(soak.outcomes.values())
        seconds, memory = samples[-1]
        print(f"{seconds:7.0f} s {memory:9.1f} MiB  {done:7d} done  {now}", flush=True)
        await asyncio.sleep(SAMPLE)
    return samples


async def drained(soak: Soak) -> dict[str, int]:
    """The gauges when nothing is left to do, or after STUCK seconds."""
    deadline = time.monotonic() + STUCK
    while True:
        now = await gauges(soak)
        idle = not any(now[n] for n in ("num_requests_running", "num_requests_waiting"))
        if (idle and not now["kv_cache_pages_used"]) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.5)


def address(server: subprocess.Popen) -> str:
    """Of a server that says that it is ready."""
    for line in server.stdout:
        if line.startswith("Ready: "):
            return line.split()[1].removesuffix("/v1")
    sys.exit(f"the server ended with status {server.wait()}")


async def fill(session: aiohttp.ClientSession, url: str) -> None:
    """Writes every page of the pool once: on a CPU it takes memory as it is used."""
    length = CONTEXT - 8
    for first in range(1000, 1000 + PAGES * 16, length):
        prompt = [1000 + (first + 7 * i) % 30000 for i in range(length)]
        body = {"prompt": prompt, "max_tokens": 1}
        async with session.post(url + "/v1/completions", json=body) as response:
            response.raise_for_status()


async def soak_for(
    minutes: float, args: argparse.Namespace, url: str, server: subprocess.Popen
) -> dict:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await fill(session, url)
        began = time.monotonic()
        soak = Soak(url, session, MODEL, began + 60 * minutes)
        clients = [client(soak, number) for number in range(args.clients)]
        process = psutil.Process(server.pid)
        samples, *_ = await asyncio.gather(watch(soak, process, began), *clients)
        end = await drained(soak)
        after = resident(process)
    warm = [memory for at, memory in samples if at >= WARM_SHARE * 60 * minutes]
    part = max(1, len(warm) // 5)
    first, last = median(warm[:part]), median(warm[-part:])
    return {
        "minutes": minutes,
        "outcomes": dict(sorted(soak.outcomes.items())),
        "odd": soak.odd[:20],
        "memory_mib": {"warm": first, "last": last, "most": max(warm), "idle": after},
        "growth": last / first - 1,
        "end": end,
    }


def serve(args: argparse.Namespace) -> subprocess.Popen:
    sizes = {
        "max-num-seqs": 16,
        "max-queue-len": QUEUE,
        "max-model-len": CONTEXT,
        "num-gpu-blocks-override": PAGES,
        "client-timeout": TIMEOUT,
        "port": 0,
        "max-stored-responses": 50,
        "served-model-name": MODEL,
        "log-level": "warning",
    }
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "llmjax_serving.cli", "serve", args.model, *flags]
    return subprocess.Popen([*command, "--no-background"], stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    args = parser.parse_args()
    server = serve(args)
    try:
        report = asyncio.run(soak_for(args.minutes, args, address(server), server))
        server.terminate()
        report["exit_status"] = server.wait(60)
    finally:
        server.kill()
    print(json.dumps(report, indent=1))
    end = report["end"]
    left = sum(end[f"num_requests_{name}"] for name in ("running", "waiting"))
    left += end["kv_cache_pages_used"]
    bad = report["odd"] or report["growth"] > GROWTH or left or report["exit_status"]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
