"""POST /v1/completions."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from aiohttp import web

from llmjax.output import CompletionOutput, RequestOutput

from .accounts import meter_of
from .body import read_json, size_of
from .formatter import ChoicesFormatter, JsonObject, new_id
from .generation import Job, Outputs, run
from .logprobs import CompletionLogprobs, Entry, prompt_logprobs
from .prompts import encode_prompt, fit, fit_beam, truncated
from .schema.completion import DEFAULT_MAX_TOKENS, CompletionRequest, parse_completion
from .schema.sampling import check_model
from .sse import respond
from .state import STATE
from .tracing import trace_of

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


class CompletionFormatter(ChoicesFormatter):
    """Choice k of prompt i has the index i * n + k."""

    body_object = chunk_object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: CompletionRequest,
        jobs: list[Job],
        tokenizer: Tokenizer,
    ):
        super().__init__(answer_id, model, request.stream_options)
        self._request = request
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._prompt_entries: dict[int, Sequence[Entry | None]] = {}
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(
            lambda: CompletionLogprobs(
                tokenizer,
                skip_special_tokens=request.params.skip_special_tokens,
                tokens_as_ids=request.tokens_as_ids,
            )
        )

    def choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        if output.prompt_logprobs is not None:
            self._prompt_entries[prompt] = output.prompt_logprobs
        return [self._choice(prompt, choice) for choice in output.outputs]

    def delta_choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        news = [
            choice
            for choice in output.outputs
            if choice.text
            or choice.finish_reason
            or choice.logprobs
            or (choice.token_ids and self._request.return_token_ids)
        ]
        return self.choices(prompt, replace(output, outputs=news))

    def _choice(self, prompt: int, choice: CompletionOutput) -> JsonObject:
        request, index = self._request, prompt * self._request.params.n + choice.index
        first = index not in self._begun
        self._begun.add(index)
        text, extra = choice.text, {}
        parts = []
        if first and request.echo:
            echoed = self._prompt_text(prompt)
            text = echoed + text
            if choice.logprobs is not None:
                parts.append(
                    self._logprobs[index].prompt(
                        echoed, self._jobs[prompt].token_ids, self._prompt_entries[prompt]
                    )
                )
        if choice.logprobs is not None:
            parts.append(self._logprobs[index].output(choice.token_ids, choice.logprobs))
        if first and request.return_prompt_logprobs:
            extra["prompt_logprobs"] = prompt_logprobs(self._prompt_entries[prompt])
        if first and request.return_token_ids:
            extra["prompt_token_ids"] = self._jobs[prompt].token_ids
        if request.return_token_ids:
            extra["token_ids"] = choice.token_ids
        return {
            "index": index,
            "text": text,
            "logprobs": joined(parts),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **extra,
        }

    def _prompt_text(self, prompt: int) -> str:
        job = self._jobs[prompt]
        if job.text is not None:
            return job.text
        return self._tokenizer.decode(job.token_ids, skip_special_tokens=False)


def joined(parts: list[JsonObject]) -> JsonObject | None:
    if not parts:
        return None
    return {key: [item for part in parts for item in part[key]] for key in parts[0]}


async def prompt_only(outputs: Outputs) -> Outputs:
    """Empties the choices: the engine cannot generate nothing, but a client may want it."""
    async with aclosing(outputs):
        async for prompt, output in outputs:
            choices = [
                replace(
                    choice,
                    text="",
                    token_ids=[],
                    logprobs=choice.logprobs and [],
                    finish_reason=choice.finish_reason and "length",
                    stop_reason=None,
                )
                for choice in output.outputs
            ]
            yield prompt, replace(output, outputs=choices)


def make_jobs(
    answer_id: str, request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int
) -> list[Job]:
    """Tokenises the prompts. Raises InvalidRequestError where one does not fit."""
    jobs = []
    for i, prompt in enumerate(request.prompts):
        if request.suffix and isinstance(prompt, str):
            special = request.add_special_tokens
            token_ids = tokenizer.encode_infill(prompt, request.suffix, special)
        else:
            token_ids = encode_prompt(tokenizer, prompt, request.add_special_tokens)
        token_ids = truncated(token_ids, request.truncate, request.params, max_model_len)
        params = fit(
            request.params,
            len(token_ids),
            max_model_len,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            param="prompt",
        )
        text = prompt if isinstance(prompt, str) else None
        beam = fit_beam(request.beam, params)
        jobs.append(Job(f"{answer_id}-{i}", token_ids, params, request.options, text, beam))
    return jobs


async def create_completion(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    engine = state.ready_engine()
    body = parse_completion(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    answer_id = new_id("cmpl", body.request_id)
    args = (answer_id, body, engine.tokenizer, engine.max_model_len)
    jobs = await state.computed(size_of(request), make_jobs, *args)
    formatter = CompletionFormatter(answer_id, state.model_name, body, jobs, engine.tokenizer)
    meter, trace = meter_of(request), trace_of(request)
    outputs = run(engine, jobs, engine.metrics, arrival, meter, trace)
    if body.echo_only:
        outputs = prompt_only(outputs)
    return await respond(request, outputs, formatter, stream=body.stream, num_prompts=len(jobs))
