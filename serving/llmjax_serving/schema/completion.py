"""The body of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmjax.beam_search import BeamSearchParams
from llmjax.errors import InvalidRequestError
from llmjax.request import MAX_TOKENS, RequestOptions, SamplingParams

from .fields import Field, Parse, boolean, described, integer, is_integer, only, read, refuse, text
from .sampling import (
    COMMON,
    NO_OPS,
    SAMPLING,
    Limits,
    StreamOptions,
    beam_params,
    check_stream,
    request_options,
    sampling_params,
    token_ids,
)

DEFAULT_MAX_TOKENS = 16
TOKEN_COUNTS = f"an integer from 1 to {MAX_TOKENS}, or 0 where echo is true"


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


@described(
    {
        "anyOf": [
            {"type": "string"},
            _IDS,
            {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
        ]
    }
)
def prompt_list(value: Any, path: str) -> list[str | list[int]]:
    """A string, a list of token ids, or a list of either."""
    if isinstance(value, str) or (value and isinstance(value, list) and is_integer(value[0])):
        value = [value]
    if not isinstance(value, list):
        raise refuse(path, value, "a string, a list of strings, token ids, or lists of token ids")
    if not value:
        raise InvalidRequestError(f"{path} is [], an empty prompt", param=path)
    for item in value:
        if not isinstance(item, str | list):
            raise refuse(path, item, "strings or lists of token ids")
    return value


@described({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS})
def token_count(value: Any, path: str) -> int:
    if not (is_integer(value) and 0 <= value <= MAX_TOKENS):
        raise refuse(path, value, TOKEN_COUNTS)
    return int(value)


FIELDS: dict[str, Field] = {
    **COMMON,
    **SAMPLING,
    "prompt": Field(prompt_list, required=True),
    "max_tokens": Field(token_count),
    "logprobs": Field(integer(0)),
    "echo": Field(boolean, False),
    "best_of": Field(integer(1)),
    "add_special_tokens": Field(boolean, True),
    "suffix": Field(text, ""),
}

COMPLETION_NO_OPS: dict[str, Parse] = {
    **NO_OPS,
    "prompt_embeds": only(),
}


@dataclass(frozen=True)
class CompletionRequest:
    """Attributes:
    params: max_tokens is None where the client said nothing.
    echo_only: the prompt is asked back and nothing else (max_tokens 0 with echo).
    suffix: what is to follow the completion.
    truncate: tokens of a prompt that stay, its last ones; -1 is what the context holds.
    """

    model: str | None
    prompts: list[str | list[int]]
    params: SamplingParams
    options: RequestOptions
    stream: bool
    stream_options: StreamOptions
    echo: bool
    echo_only: bool
    add_special_tokens: bool
    suffix: str
    truncate: int | None
    request_id: str | None
    return_token_ids: bool
    tokens_as_ids: bool
    return_prompt_logprobs: bool
    beam: BeamSearchParams | None


def parse_completion(body: dict[str, Any], limits: Limits) -> CompletionRequest:
    """Reads the JSON body of /v1/completions.

    Raises:
        InvalidRequestError: names the field at fault.
    """
    values = read(body, FIELDS, COMPLETION_NO_OPS)
    options = check_stream(values)
    most, count = limits.max_prompts, len(values["prompt"])
    if most is not None and count > most:
        message = f"{count} prompts were sent, allowed: {most} (the server's --max-queue-len)"
        raise InvalidRequestError(message, param="prompt")
    prompts = [
        prompt if isinstance(prompt, str) else token_ids(prompt, limits, "prompt")
        for prompt in values["prompt"]
    ]
    if values["suffix"] and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequestError("suffix is allowed with a prompt of text only", param="suffix")
    n, best_of = values["n"] or 1, values["best_of"]
    if best_of not in (None, n):
        raise refuse("best_of", best_of, f"the value of n ({n})")
    max_tokens, echo = values["max_tokens"], values["echo"]
    if max_tokens == 0 and not echo:
        raise refuse("max_tokens", 0, TOKEN_COUNTS)
    wants_prompt_logprobs = values["prompt_logprobs"] is not None
    if echo and values["logprobs"] is not None and not wants_prompt_logprobs:
        values["prompt_logprobs"] = values["logprobs"]
    params = sampling_params(
        values,
        limits,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        logprobs=values["logprobs"],
        logprobs_field="logprobs",
    )
    return CompletionRequest(
        model=values["model"],
        prompts=prompts,
        params=params,
        options=request_options(values),
        stream=values["stream"],
        stream_options=options,
        echo=echo,
        echo_only=max_tokens == 0,
        add_special_tokens=values["add_special_tokens"],
        suffix=values["suffix"],
        truncate=values["truncate_prompt_tokens"],
        request_id=values["request_id"],
        return_token_ids=values["return_token_ids"],
        tokens_as_ids=values["return_tokens_as_token_ids"],
        return_prompt_logprobs=wants_prompt_logprobs,
        beam=beam_params(values, limits),
    )
