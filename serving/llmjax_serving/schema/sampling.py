"""The fields that completions and chat share, and their SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmjax.beam_search import BeamSearchParams
from llmjax.errors import InvalidRequestError
from llmjax.request import MAX_FLOAT, MAX_TIMEOUT, RequestOptions, SamplingParams

from . import structured
from .fields import (
    Field,
    Parse,
    boolean,
    bounded,
    described,
    integer,
    is_integer,
    list_of,
    mapping,
    number,
    object_schema,
    one_or_list_of,
    only,
    read,
    refuse,
    shown,
    text,
)


@dataclass(frozen=True)
class Limits:
    """What the loaded model allows.

    Attributes:
        vocab_size: token ids are below it.
        max_prompts: of one request; None is no limit.
        defaults: sampling values of the model's authors, where a client says nothing.
        chat_templates: requests may bring their own.
    """

    vocab_size: int
    max_logprobs: int
    max_prompts: int | None
    defaults: Mapping[str, float]
    chat_templates: bool = False


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage: bool = False


@described({"type": "object", "additionalProperties": {"type": "number"}})
def logit_bias(value: Any, path: str) -> dict[int, float]:
    biases = {}
    for key, bias in mapping(value, path).items():
        # "07" would be another key for the token of "7".
        if not re.fullmatch("0|[1-9][0-9]{0,18}", key):
            raise refuse(path, {key: bias}, "token ids as keys")
        biases[int(key)] = number(bias, f"{path}.{key}")
    return biases


_STREAM_OPTIONS: dict[str, Field] = {
    "include_usage": Field(boolean, False),
    "continuous_usage_stats": Field(boolean, False),
}
_STREAM_NO_OPS: dict[str, Parse] = {"include_obfuscation": only(False)}


@described(object_schema(_STREAM_OPTIONS, _STREAM_NO_OPS))
def stream_options(value: Any, path: str) -> StreamOptions:
    options = read(mapping(value, path), _STREAM_OPTIONS, _STREAM_NO_OPS, f"{path}.")
    return StreamOptions(options["include_usage"], options["continuous_usage_stats"])


@described({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]})
def truncation(value: Any, path: str) -> int:
    if not (is_integer(value) and (value == -1 or value > 0)):
        raise refuse(path, value, "an integer from 1, or -1 for what the context holds")
    return int(value)


REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@described({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
def request_id(value: Any, path: str) -> str:
    if not REQUEST_ID.fullmatch(text(value, path)):
        raise refuse(path, value, "up to 128 letters, digits and any of _.:-")
    return value


SAMPLING: dict[str, Field] = {
    "n": Field(bounded(integer(), minimum=1, maximum=64)),
    "temperature": Field(bounded(number, minimum=0, maximum=2)),
    "top_p": Field(bounded(number, exclusiveMinimum=0, maximum=1)),
    "top_k": Field(bounded(integer(), minimum=-1, maximum=2**31 - 1)),
    "min_p": Field(bounded(number, minimum=0, maximum=1)),
    "repetition_penalty": Field(bounded(number, exclusiveMinimum=0, maximum=MAX_FLOAT)),
    "presence_penalty": Field(bounded(number, minimum=-2, maximum=2)),
    "frequency_penalty": Field(bounded(number, minimum=-2, maximum=2)),
    "seed": Field(bounded(integer(), minimum=-(2**63), maximum=2**63 - 1)),
    "min_tokens": Field(bounded(integer(), minimum=0, maximum=2**31 - 1)),
    "stop": Field(one_or_list_of(text)),
    "stop_token_ids": Field(list_of(integer(0))),
    "ignore_eos": Field(boolean),
    "prompt_logprobs": Field(integer(0)),
    "logit_bias": Field(logit_bias),
    "include_stop_str_in_output": Field(boolean),
    "skip_special_tokens": Field(boolean),
    "allowed_token_ids": Field(list_of(integer(0))),
    "bad_words": Field(list_of(text)),
}
"""Fields of the same name and meaning in SamplingParams, which holds defaults and ranges."""

BEAM_FIELDS = {"n", "temperature", "ignore_eos", "skip_special_tokens"}
"""Fields of SAMPLING that a beam search knows."""

OPTIONS: dict[str, Field] = {
    "priority": Field(bounded(integer(), minimum=-(2**63), maximum=2**63 - 1)),
    "cache_salt": Field(bounded(text, minLength=1)),
    "user": Field(text),
    "timeout": Field(bounded(number, exclusiveMinimum=0, maximum=MAX_TIMEOUT)),
    "queue_timeout": Field(bounded(number, exclusiveMinimum=0, maximum=MAX_TIMEOUT)),
}
"""Fields of the same name and meaning in RequestOptions, which holds defaults and ranges."""

COMMON: dict[str, Field] = {
    **OPTIONS,
    **structured.FIELDS,
    "model": Field(text),
    "stream": Field(boolean, False),
    "stream_options": Field(stream_options),
    "return_token_ids": Field(boolean, False),
    "return_tokens_as_token_ids": Field(boolean, False),
    "truncate_prompt_tokens": Field(truncation),
    "request_id": Field(request_id),
    "use_beam_search": Field(boolean, False),
    "length_penalty": Field(bounded(number, minimum=-10, maximum=10), 1.0),
}

NO_OPS: dict[str, Parse] = {
    # OpenAI: hints and labels that need no answer.
    "metadata": mapping,
    "moderation": only(),
    "safety_identifier": text,
    "prompt_cache_key": text,
    "prompt_cache_options": only(),
    "prompt_cache_retention": only("in_memory"),
    "service_tier": only("auto", "default"),
    "store": only(False),
    # vLLM: features that are off at these values.
    "kv_transfer_params": only(),
    "logits_processors": only([]),
    # Nothing is put between tokens, as by transformers' fast tokenizers.
    "spaces_between_special_tokens": boolean,
}
"""Fields that completions and chat accept where their value asks for nothing."""


def check_model(requested: str | None, served: str) -> None:
    if requested is not None and requested != served:
        raise InvalidRequestError(
            f"the model {shown(requested)} does not exist; this server has {shown(served)}",
            param="model",
            code="model_not_found",
        )


def check_stream(values: Mapping[str, Any]) -> StreamOptions:
    if values["stream_options"] is not None and not values["stream"]:
        raise InvalidRequestError(
            "stream_options is allowed only where stream is true", param="stream_options"
        )
    if values["stream"] and values["prompt_logprobs"] is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs"
        )
    return values["stream_options"] or StreamOptions()


def beam_params(values: Mapping[str, Any], limits: Limits) -> BeamSearchParams | None:
    """What a request for a beam search asks for; `max_tokens` is to be fitted to the prompt.

    Raises:
        InvalidRequestError: something is asked for that a beam search does not give.
    """
    if not values["use_beam_search"]:
        if values["length_penalty"] != 1:
            raise refuse("length_penalty", values["length_penalty"], "1, or use_beam_search")
        return None
    if values["stream"]:
        raise InvalidRequestError("a beam search cannot be streamed", param="stream")
    if values["temperature"] not in (None, 0, 1):
        raise refuse("temperature", values["temperature"], "none in a beam search")
    others = {"logprobs", "top_logprobs", "echo", "tools", *structured.FIELDS}
    for name in (SAMPLING.keys() | others) - BEAM_FIELDS:
        if _asks(name, values.get(name)):
            raise InvalidRequestError(f"{name}: allowed is none in a beam search", param=name)
    width, most = values["n"] or 1, limits.max_logprobs // 2
    if width > most:
        raise refuse("n", width, f"up to {most} beams (half of the server's --max-logprobs)")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=1,
        ignore_eos=bool(values["ignore_eos"]),
        length_penalty=values["length_penalty"],
    )


_DEFAULTS = SamplingParams()


def _asks(name: str, value: Any) -> bool:
    """Whether a value asks for anything: 0 may, as of log-probabilities."""
    is_nothing = value is None or value is False or value in ([], (), {})
    return not is_nothing and value != getattr(_DEFAULTS, name, None)


def sampling_params(
    values: Mapping[str, Any],
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_field: str,
    thinking_token_budget: int | None = None,
) -> SamplingParams:
    """SamplingParams of a request that was read by a table with SAMPLING in it.

    Raises:
        InvalidRequestError: a value is out of its range or beyond what the model has.
    """
    counts = {logprobs_field: logprobs, "prompt_logprobs": values["prompt_logprobs"]}
    for field, count in counts.items():
        if count is not None and count > limits.max_logprobs:
            raise refuse(field, count, f"up to {limits.max_logprobs} (the server's --max-logprobs)")
    for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        token_ids(values[field] or (), limits, field)
    given = {name: values[name] for name in SAMPLING if values[name] is not None}
    return SamplingParams(
        **{**limits.defaults, **given},
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured.wanted(values),
        thinking_token_budget=thinking_token_budget,
    )


def request_options(values: Mapping[str, Any]) -> RequestOptions:
    """RequestOptions of a request that was read by a table with OPTIONS in it.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    return RequestOptions(**{n: values[n] for n in OPTIONS if values[n] is not None})


def token_ids(ids: Iterable[Any], limits: Limits, path: str) -> list[int]:
    """`ids`, proved to be tokens of the model: a gather on the device would only clamp them."""
    for token in ids:
        if not (is_integer(token) and 0 <= token < limits.vocab_size):
            raise refuse(path, token, f"token ids from 0 to {limits.vocab_size - 1}")
    return [int(token) for token in ids]
