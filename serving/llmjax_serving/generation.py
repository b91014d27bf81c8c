"""Runs the prompts of one HTTP request through the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmjax.beam_search import BeamSearch, BeamSearchParams
from llmjax.errors import (
    EngineDeadError,
    InvalidRequestError,
    LlmjaxError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
)
from llmjax.metrics import Metrics
from llmjax.output import RequestOutput
from llmjax.request import RequestOptions, SamplingParams

from .accounts import Meter
from .engines import TextClient
from .errors import unavailable

if TYPE_CHECKING:
    from .tracing import Trace


@dataclass(frozen=True)
class Job:
    """One prompt for the engine; `text` is None where the client sent ids.

    Attributes:
        beam: asks for a beam search; of `params` only `n`, its width, is of interest then.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    text: str | None = None
    beam: BeamSearchParams | None = None


@dataclass
class Stopwatch:
    """Observes one prompt's progress into `metrics`.

    Attributes:
        arrival, began, first, last: when it came, first ran, and had its first and latest tokens
            (`time.monotonic`); 0 before that.
        error: why it failed.
    """

    metrics: Metrics
    arrival: float
    choices: int
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: Exception | None = None

    def observe(self, output: RequestOutput) -> None:
        self.metrics = self.metrics.of(output.engine)
        now = time.monotonic()
        new = sum(len(choice.token_ids) for choice in output.outputs)
        if not self.first:
            self.began, self.first = output.began, now
            self.metrics.time_to_first_token.observe(now - self.arrival)
            self.metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            self.metrics.request_prompt_tokens.observe(len(output.prompt_token_ids))
        elif new:
            # Tokens of several choices come out of one step, so the longest run counts.
            longest = max(len(choice.token_ids) for choice in output.outputs)
            self.metrics.inter_token_latency.observe((now - self.last) / longest)
        self.last = now
        self.num_tokens += new
        self.metrics.generation_tokens.inc(new)
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self.finish_reasons.append(choice.finish_reason)
                self.metrics.count_finished(choice.finish_reason)

    def close(self) -> None:
        # As vLLM counts what nobody asked to end.
        broken = isinstance(self.error, RequestFailedError | EngineDeadError)
        for _ in range(self.choices - len(self.finish_reasons)):
            self.metrics.count_finished("error" if broken else "abort")
        if not self.first:
            return
        self.metrics.e2e_latency.observe(self.last - self.arrival)
        self.metrics.request_generation_tokens.observe(self.num_tokens)
        self.metrics.decode_time.observe(self.last - self.first)
        per_choice = self.num_tokens / self.choices
        if per_choice > 1:
            mean = (self.last - self.first) / (per_choice - 1)
            self.metrics.time_per_output_token.observe(mean)


Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""(number of the prompt, news of it)"""


def generate(
    engine: TextClient, job: Job, on_cut: Callable[[RequestOutput], None] | None = None
) -> AsyncGenerator[RequestOutput, None]:
    return engine.generate(
        job.request_id,
        job.token_ids,
        job.params,
        prompt=job.text,
        options=job.options,
        on_cut=on_cut,
    )


async def search_beams(engine: TextClient, job: Job) -> AsyncGenerator[RequestOutput, None]:
    """Yields all completions at once, at the end."""
    assert job.beam is not None
    eos, longest = engine.tokenizer.eos_token_ids, engine.max_model_len
    search = BeamSearch(job.token_ids, job.beam, eos, longest)
    options, timeout = job.options, job.options.timeout
    try:
        # Its timeout is that of all steps together.
        async with asyncio.timeout(timeout):
            while prompts := search.prompts:
                jobs = [Job(job.request_id, ids, job.beam.step, options) for ids in prompts]
                steps = [asyncio.ensure_future(whole(generate(engine, step))) for step in jobs]
                try:
                    search.take(await asyncio.gather(*steps))
                finally:
                    for step in steps:
                        step.cancel()
                options = replace(options, queue_timeout=None)  # it has begun
    except TimeoutError as error:
        if isinstance(error, LlmjaxError) or timeout is None:
            raise
        raise RequestTimeoutError(
            f"the request had not ended {timeout:g} s after its arrival, its timeout"
        ) from error
    yield search.output(job.request_id, job.text, engine.tokenizer.decode)


async def whole(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """The news of a request put together."""
    so_far = None
    async with aclosing(stream):
        async for news in stream:
            if so_far is None:
                so_far = news
            else:
                merge(so_far, news)
    assert so_far is not None
    return so_far


async def run_job(
    engine: TextClient, job: Job, metrics: Metrics, arrival: float, meter: Meter, trace: Trace
) -> AsyncGenerator[RequestOutput, None]:
    """Yields the news of one prompt; closing it early aborts the request."""
    watch = Stopwatch(metrics, arrival, job.params.n)

    def cut(untold: RequestOutput) -> None:
        meter.charge_output(untold, is_first=not watch.first)

    stream = search_beams(engine, job) if job.beam is not None else generate(engine, job, cut)
    try:
        async with aclosing(stream):
            async for output in stream:
                meter.charge_output(output, is_first=not watch.first)
                watch.observe(output)
                if any(choice.finish_reason == "abort" for choice in output.outputs):
                    raise unavailable("the server aborted this request", "aborted")
                yield output
    except Exception as error:
        watch.error = error
        if isinstance(error, InvalidRequestError | QueueFullError):
            watch.choices = 0  # refused: none of them began
        raise
    finally:
        watch.close()
        trace.generated(job, watch)


async def run(
    engine: TextClient,
    jobs: Sequence[Job],
    metrics: Metrics,
    arrival: float,
    meter: Meter,
    trace: Trace,
) -> Outputs:
    """Yields (prompt number, news) of all jobs as they come, charges and traces them.

    Nothing is pulled ahead of the consumer but one output of each job. Closing it early, or
    an error of one job, aborts them all.
    """
    streams = [run_job(engine, job, metrics, arrival, meter, trace) for job in jobs]
    if len(streams) == 1:
        async with aclosing(streams[0]):
            async for output in streams[0]:
                yield 0, output
        return
    waiting: dict[asyncio.Task[Any], int] = {
        asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    output = task.result()
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                    yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def collect(outputs: Outputs, num_prompts: int) -> list[RequestOutput]:
    """Gathers the news of each prompt into one whole RequestOutput, choices by index."""
    whole: list[RequestOutput | None] = [None] * num_prompts
    async for index, news in outputs:
        so_far = whole[index]
        if so_far is None:
            whole[index] = news
        else:
            merge(so_far, news)
    for output in whole:
        assert output is not None
        output.outputs.sort(key=lambda choice: choice.index)
    return whole  # type: ignore[return-value]


def merge(so_far: RequestOutput, news: RequestOutput) -> None:
    """Appends the deltas of `news` to `so_far`."""
    known = {choice.index: choice for choice in so_far.outputs}
    for choice in news.outputs:
        old = known.get(choice.index)
        if old is None:
            so_far.outputs.append(choice)
            continue
        old.text += choice.text
        old.token_ids += choice.token_ids
        if choice.logprobs:
            old.logprobs = [*(old.logprobs or []), *choice.logprobs]
        old.finish_reason, old.stop_reason = choice.finish_reason, choice.stop_reason
    if news.prompt_logprobs is not None:
        so_far.prompt_logprobs = news.prompt_logprobs
    so_far.num_cached_tokens = max(so_far.num_cached_tokens, news.num_cached_tokens)
    so_far.finished = news.finished
