"""An engine without a model: says what a test tells it to, one byte a token."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from aiohttp.test_utils import TestClient, TestServer

from llmjax.config import EngineConfig
from llmjax.errors import ChatTemplateError, EngineDeadError, ShutdownError
from llmjax.metrics import Metrics
from llmjax.output import CompletionOutput, Logprob, RequestOutput
from llmjax.request import RequestOptions, SamplingParams
from llmjax_serving.app import make_app
from llmjax_serving.config import ServerConfig
from llmjax_serving.state import ServerState

BOS, EOS, VOCAB = 256, 257, 258
MODEL = "double"
MAX_MODEL_LEN = 1000


class ByteTokenizer:
    """Ids 0 to 255 are bytes; then BOS and EOS."""

    vocab_size = VOCAB
    special_ids = frozenset((BOS, EOS))
    chat_template = tool_template = "yes"
    special_tokens: ClassVar = {"<s>": BOS, "</s>": EOS}

    def __init__(self, adds_bos: bool = False):
        self.adds_bos = adds_bos
        self.bos_token_id, self.eos_token_ids = (BOS if adds_bos else None), frozenset((EOS,))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        prefix = [BOS] if self.adds_bos and add_special_tokens else []
        return prefix + list(text.encode())

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        roles = [message["role"] for message in messages]
        if any(a == b for a, b in itertools.pairwise(roles)):
            raise ChatTemplateError("roles must alternate", param="messages")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        extra = "".join(f"{k}={v}" for k, v in kwargs.items())
        return text + extra + ("<assistant>" if add_generation_prompt else "")

    def encode_chat(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **kwargs))

    def encode_infill(self, prefix: str, suffix: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode(f"<before>{prefix}<after>{suffix}<middle>", add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token) or bytes([token])

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")


@dataclass
class EngineDouble:
    """Attributes:
    says: the text of every choice, in the pieces in which it comes.
    fails: raised instead of the piece with the number `fails_at`.
    gate: where given, every piece but the first waits until it is set.
    pulled, snapshots, running, seen, options: what the server did.
    """

    says: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    fails: Exception | None = None
    fails_at: int = 0
    gate: asyncio.Event | None = None
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    dead: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ends: str = "stop"
    stopped: bool = False
    queued: int = 0
    pulled: int = 0
    snapshots: int = 0
    running: dict[str, SamplingParams] = field(default_factory=dict)
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    options: list[RequestOptions | None] = field(default_factory=list)
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB
    generation_defaults: dict[str, float] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=lambda: EngineConfig.of("some/path"))
    metrics: Metrics = field(default_factory=lambda: Metrics(MODEL))

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)

    def stats_of_each(self) -> list[Any]:
        return [self.stats()]

    def stats(self) -> Any:
        return SimpleNamespace(
            num_running=len(self.running),
            num_waiting=0,
            num_queued=self.queued,
            pages_used=1,
            pages_cached=1,
            pages_free=2,
            prefix_queries=9,
            prefix_hits=4,
            pages_saved=2,
            pages_loaded=1,
            host_pages=8,
            host_pages_used=1,
            page_bytes=1024,
            num_preemptions=5,
            padded_tokens=7,
            bucket_tokens=70,
            num_held=0,
            workers_up=0,
        )

    async def snapshot(self, number: int = 0) -> dict[str, Any]:
        self.check_health()
        self.snapshots += 1
        sequence = {
            "id": "0-4",
            "arrival": 5,
            "prompt_tokens": 60,
            "computed": 30,
            "cached": 16,
            "output_tokens": 0,
            "max_tokens": 20,
            "pages": 8,
            "forgotten": 0,
            "priority": 0,
            "preemptions": 0,
            "age": 1.5,
        }
        other = sequence | {"id": "0-5", "arrival": 6, "computed": 60, "output_tokens": 7}
        other |= {"cached": 0, "forgotten": 1024, "priority": -2}
        node = {
            "key": "a",
            "tokens": 400,
            "nodes": 25,
            "device": 20,
            "host": 5,
            "hits": 9,
            "running": 2,
            "children": [],
            "more": 3,
            "cut": False,
        }
        leaf = node | {"key": "b", "tokens": 17, "hits": 1, "more": 0}
        tree = [node | {"key": "r", "tokens": 0, "children": [node | {"children": [leaf]}]}]
        stats = {"num_running": 2, "num_waiting": 6}
        return {
            "model": MODEL,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": 16,
            "groups": 2,
            "num_pages": 64,
            "steps": 12,
            "stats": vars(self.stats()) | stats,
            "tree": tree,
            "pages": {"size": 1, "cells": [0] * 30 + [1] * 10 + [2] * 8 + [3] * 8 + [4] * 8},
            "running": [sequence, other],
            "waiting": [sequence | {"id": f"0-{n}", "arrival": n + 1} for n in (6, 7)],
        }

    def start(self) -> None:
        """It has no thread to start."""

    @property
    def num_requests(self) -> int:
        return len(self.running)

    async def drain(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        cut_off = len(self.running)
        self.stop()
        return cut_off

    def stop(self) -> None:
        self.stopped = True
        self.ended.set()

    async def generate(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        on_cut: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.running[request_id] = params
        self.seen.append((ids, params))
        self.options.append(options)
        try:
            left = params.max_tokens or MAX_MODEL_LEN
            for number, piece in enumerate(self.says):
                if self.fails is not None and number == self.fails_at:
                    raise self.fails
                while self.gate is not None and number and not self.gate.is_set():
                    if self.stopped:
                        raise ShutdownError("the engine was shut down")
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0)
                tokens = list(piece.encode())[:left]
                left -= len(tokens)
                ends = self.ends if number == len(self.says) - 1 else None if left else "length"
                self.pulled += 1
                first = number == 0
                yield RequestOutput(
                    request_id=request_id,
                    prompt=prompt,
                    prompt_token_ids=ids,
                    outputs=[
                        CompletionOutput(
                            index=k,
                            text=bytes(tokens).decode(),
                            token_ids=list(tokens),
                            logprobs=self._logprobs(tokens, params.logprobs),
                            finish_reason=ends,
                        )
                        for k in range(params.n)
                    ],
                    finished=ends is not None,
                    prompt_logprobs=self._prompt_logprobs(ids, params) if first else None,
                    num_cached_tokens=2,
                )
                if ends:
                    return
        finally:
            del self.running[request_id]

    def _logprobs(self, tokens: list[int], top: int | None) -> list[dict[int, Logprob]] | None:
        if top is None:
            return None
        # The chosen token is the second best of three.
        ranked = lambda t: [((t + 1) % 256, -0.5), (t, -1.0), ((t + 2) % 256, float("-inf"))]  # noqa: E731
        return [
            {
                i: Logprob(value, rank, self.tokenizer.token_text(i))
                for rank, (i, value) in enumerate(ranked(t), 1)
                if i == t or rank <= top
            }
            for t in tokens
        ]

    def _prompt_logprobs(self, ids: list[int], params: SamplingParams) -> Any:
        if params.prompt_logprobs is None:
            return None
        return [None, *(self._logprobs(ids[1:], params.prompt_logprobs) or [])]


@asynccontextmanager
async def client_of(
    engine: EngineDouble | None, config: ServerConfig | None = None
) -> AsyncIterator[TestClient]:
    """A client of an app around `engine` (None: still loading)."""
    state = ServerState(MODEL, config or ServerConfig(), engine=engine)  # type: ignore[arg-type]
    server = TestServer(make_app(state), handler_cancellation=True)
    async with TestClient(server) as client:
        client.state = state  # type: ignore[attr-defined]
        yield client
    state.close()


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a coroutine function a test that pytest can run."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return wrapper


async def until(condition: Callable[[], Any]) -> None:
    """Waits, for the few turns of the event loop that it takes, until `condition` holds."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about in 30 s")


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]
