"""Requests, their news and errors as what msgpack knows: arrays, maps, numbers, texts, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgpack

from llmjax import errors
from llmjax.errors import LlmjaxError, RequestFailedError
from llmjax.request import (
    FinishReason,
    Request,
    RequestOptions,
    SamplingParams,
    SequenceDelta,
    TokenLogprobs,
)
from llmjax.structured_outputs import Reasoning, StructuredOutputs

from ..errors import ApiError

_DEFAULTS = vars(SamplingParams())
_DEFAULT_OPTIONS = vars(RequestOptions())
_KEPT = ("param", "code", "retry_after")
"""What errors have beside their text."""


def params_out(params: SamplingParams) -> bytes:
    given = _others(vars(params), _DEFAULTS)
    wanted = params.structured_outputs
    if wanted is not None:
        given["structured_outputs"] = {f.name: getattr(wanted, f.name) for f in fields(wanted)}
    return msgpack.packb(given)


@lru_cache(1024)
def params_in(packed: bytes) -> SamplingParams:
    """The same ones come again and again: they are read once."""
    given = _unpacked(packed)
    if (wanted := given.get("structured_outputs")) is not None:
        if wanted["after"] is not None:
            wanted["after"] = Reasoning(*wanted["after"])
        given["structured_outputs"] = StructuredOutputs(**wanted)
    if "reasoning" in given:
        given["reasoning"] = Reasoning(*given["reasoning"])
    return SamplingParams(**given)


def options_out(options: RequestOptions) -> bytes:
    return msgpack.packb(_others(vars(options), _DEFAULT_OPTIONS))


@lru_cache(1024)
def options_in(packed: bytes) -> RequestOptions:
    return RequestOptions(**_unpacked(packed))


def _others(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value != defaults[name]}


def _unpacked(packed: bytes) -> dict[str, Any]:
    return msgpack.unpackb(packed, use_list=False, strict_map_key=False)


def request_out(request: Request) -> tuple[Any, ...]:
    """Monotonic time is that of the machine."""
    params, options = params_out(request.params), options_out(request.options)
    return request.id, request.prompt_token_ids, params, options, request.arrival_time


def request_in(
    prefix: str,
    eos_token_ids: frozenset[int],
    request_id: str,
    token_ids: tuple[int, ...],
    params: bytes,
    options: bytes,
    arrival: float,
) -> Request:
    return Request(
        prefix + request_id,
        list(token_ids),
        params_in(params),
        eos_token_ids,
        options_in(options),
        arrival_time=arrival,
    )


def delta_out(delta: SequenceDelta, request_id: str, request: Request) -> tuple[Any, ...]:
    """Args:
    request_id: what the other side calls it.
    """
    return (
        request_id,
        delta.index,
        delta.token_ids,
        delta.finish_reason,
        delta.stop_reason,
        delta.num_cached_tokens,
        request.engine,
        request.began,
        delta.logprobs,
        delta.prompt_logprobs,
        delta.error and error_out(delta.error),
    )


def delta_in(told: tuple[Any, ...]) -> tuple[SequenceDelta, int, float]:
    """The delta, the number of the replica, and when the request began (`Request.began`)."""
    request_id, index, token_ids, finish, stop, cached, engine, began, rows, prompt, error = told
    delta = SequenceDelta(
        request_id,
        index,
        list(token_ids),
        [TokenLogprobs(*row) for row in rows],
        [TokenLogprobs(*row) for row in prompt],
        finish and FinishReason(finish),
        stop,
        cached,
        error and error_in(error),
    )
    return delta, engine, began


def error_out(error: Exception) -> tuple[Any, ...]:
    match error:
        case ApiError():
            more = {"status": error.status, "headers": error.headers}
            return "ApiError", str(error), {**more, "param": error.param, "code": error.code}
        case LlmjaxError():
            kept = {name: getattr(error, name) for name in _KEPT if hasattr(error, name)}
            return type(error).__name__, str(error), kept
        case _:
            return RequestFailedError.__name__, f"{type(error).__name__}: {error}", {}


def error_in(told: tuple[Any, ...]) -> Any:
    """A LlmjaxError, or an ApiError."""
    name, text, more = told
    if name == "ApiError":
        return ApiError(message=text, **more)
    kind = getattr(errors, name)
    return kind(text, **more) if more else kind(text)
