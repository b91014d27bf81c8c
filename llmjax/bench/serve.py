"""Load on an OpenAI-compatible server over HTTP: what comes, how soon, and how steadily."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tqdm.auto import tqdm

from ..errors import LlmjaxError
from .lengths import require_room

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also well did "
    "many before must through years where much your way down should because long each just state "
    "people how too little world good very year still see work such life three might under water "
    "house never again place while right found hand part school small country night however home "
    "head end side without once number course war fact public eyes early city almost light"
)
"""Common words: nearly every vocabulary has a token for each."""
MOST_SHOWN = 200
"""Characters of what a server says of an error."""
# Streams may be silent for as long as a queue is.
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)


@dataclass(frozen=True)
class Target:
    """Attributes:
    url: of the server, up to where the endpoint begins.
    extras: fields that the server is known to take, beside those that every one takes.
    """

    url: str
    endpoint: str
    model: str
    api_key: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        said = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.endpoint == CHAT
            else {"prompt": prompt}
        )
        limit = {"max_tokens": max_tokens, "temperature": 0, "stream": True}
        return {"model": self.model, **said, **limit, **self.extras}


@dataclass
class Answer:
    """One request.

    Attributes:
        sent: when, on the clock of `time.perf_counter`.
        arrivals: when each piece of text came.
        usage: tokens by the server's count; None where it does not say.
        error: why it failed, or None.
    """

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return self.usage["completion_tokens"] if self.usage else len(self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True)
class Load:
    """Requests to send: `max_concurrency` at a time, each as soon as there is room for it."""

    num_prompts: int
    max_concurrency: int
    input_len: int
    output_len: int
    seed: int = 0


@dataclass(frozen=True)
class ServeResult:
    """Attributes:
    seconds: wall time from the first request sent to the last byte read.
    """

    answers: list[Answer]
    seconds: float

    def report(self) -> dict[str, Any]:
        """Rates a second and times in milliseconds; None where nothing was answered."""
        done = [a for a in self.answers if a.error is None]
        output = sum(a.output_tokens for a in done)
        return {
            "completed": len(done),
            "failed": len(self.answers) - len(done),
            "errors": dict(Counter(a.error for a in self.answers if a.error is not None)),
            "seconds": self.seconds,
            "prompt_tokens": sum(a.usage["prompt_tokens"] for a in done if a.usage),
            "output_tokens": output,
            "output_tokens_per_second": output / self.seconds,
            "requests_per_second": len(done) / self.seconds,
            # Tokens may have no text: half a character, or an end that was ignored.
            "ttft_ms": _percentiles([a.ttft for a in done if a.arrivals]),
            "itl_ms": _percentiles([gap for a in done for gap in a.gaps]),
        }

    def table(self) -> str:
        said = self.report()
        lines = [
            f"{'completed':<26}{said['completed']:>10}",
            f"{'failed':<26}{said['failed']:>10}",
            f"{'seconds':<26}{said['seconds']:>10.2f}",
            f"{'output tokens a second':<26}{said['output_tokens_per_second']:>10.1f}",
            f"{'requests a second':<26}{said['requests_per_second']:>10.2f}",
            f"{'milliseconds':<26}{'p50':>10}{'p99':>10}",
        ]
        for title, times in (
            ("to the first token", said["ttft_ms"]),
            ("between pieces of text", said["itl_ms"]),
        ):
            if times:
                lines.append(f"{title:<26}{times['p50']:>10.1f}{times['p99']:>10.1f}")
        lines += [f"{count} failed: {error}" for error, count in said["errors"].items()]
        return "\n".join(lines)


def measure(target: Target, load: Load) -> ServeResult:
    """Sends the load and waits for all of it.

    Raises:
        LlmjaxError: the server cannot be reached, or refuses a first request.
        ConfigError: the server says that its context is shorter than a request.
    """
    return asyncio.run(_measure(target, load))


def prompts(num_words: int, seed: int) -> Iterator[str]:
    """Texts of random words without end; no two begin alike."""
    rng, words = random.Random(seed), WORDS.split()
    while True:
        yield " ".join(rng.choices(words, k=num_words))


async def _measure(target: Target, load: Load) -> ServeResult:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    # Servers may close a connection at any time between requests, as llama.cpp's does.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=TIMEOUT
    ) as session:
        target = await _fit_to_server(session, target)
        if (context := await _context_of(session, target)) is not None:
            require_room(context, {"input_len": load.input_len, "output_len": load.output_len})
        num_words = await _words_of(session, target, load.input_len)
        waiting = prompts(num_words, load.seed)
        answers = [Answer() for _ in range(load.num_prompts)]
        left = iter(answers)
        with tqdm(total=load.num_prompts, desc="requests", dynamic_ncols=True) as bar:

            async def work() -> None:
                for answer in left:
                    await _ask(session, target, next(waiting), load.output_len, answer)
                    bar.update()

            start = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(load.max_concurrency)))
            return ServeResult(answers, time.perf_counter() - start)


async def _fit_to_server(session: aiohttp.ClientSession, target: Target) -> Target:
    """The target with those extra fields that the server does not refuse."""
    usage = {"stream_options": {"include_usage": True}}
    answer = Answer()
    for extras in ({"ignore_eos": True, **usage}, usage, {}):
        target = Target(target.url, target.endpoint, target.model, target.api_key, extras)
        answer = Answer()
        await _ask(session, target, "Hello", 2, answer)
        if answer.error is None:
            return target
    raise LlmjaxError(f"{target.url}{target.endpoint} does not answer: {answer.error}")


async def _context_of(session: aiohttp.ClientSession, target: Target) -> int | None:
    """Tokens that a sequence may have there, as llmjax and vLLM list; None where it is not said."""
    try:
        async with session.get(f"{target.url}/v1/models") as response:
            models = (await response.json(content_type=None))["data"]
        lengths = {model["id"]: model.get("max_model_len") for model in models}
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    context = lengths.get(target.model)
    return context if type(context) is int else None


async def _words_of(session: aiohttp.ClientSession, target: Target, tokens: int) -> int:
    """Words that make about `tokens` tokens there, a chat's template included."""
    counted: list[int] = []
    for num_words in (1, 1 + tokens):
        answer = Answer()
        await _ask(session, target, next(prompts(num_words, seed=-1)), 1, answer)
        if answer.error is not None:
            raise LlmjaxError(f"a prompt of {num_words} words is refused: {answer.error}")
        counted.append(answer.usage["prompt_tokens"] if answer.usage else num_words)
    tokens_of_a_word = max(1, counted[1] - counted[0]) / tokens
    return max(1, 1 + round((tokens - counted[0]) / tokens_of_a_word))


async def _ask(
    session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int, answer: Answer
) -> None:
    body = target.body(prompt, max_tokens)
    answer.sent = time.perf_counter()
    try:
        async with session.post(target.url + target.endpoint, json=body) as response:
            if response.status != 200:
                said = " ".join((await response.text()).split())
                answer.error = f"HTTP {response.status}: {said}"[:MOST_SHOWN]
                return
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if data != b"[DONE]" and line.startswith(b"data:"):
                    _take(json.loads(data), answer)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = (str(error) or type(error).__name__)[:MOST_SHOWN]
        return
    if not answer.output_tokens:
        answer.error = "the answer has no tokens"


def _take(event: Any, answer: Answer) -> None:
    """Notes what an event of a stream says. Raises ValueError where it is an error."""
    if not isinstance(event, dict) or event.get("error"):
        raise ValueError(f"in the stream: {event}")
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice
        if said.get("text") or said.get("content") or said.get("reasoning_content"):
            answer.arrivals.append(time.perf_counter())
    answer.usage = event.get("usage") or answer.usage


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles and the mean, in milliseconds."""
    if not seconds:
        return None
    ranked = sorted(1e3 * s for s in seconds)
    at = {f"p{p}": ranked[math.ceil(p / 100 * len(ranked)) - 1] for p in (50, 99)}
    return {"mean": sum(ranked) / len(ranked), **at}
