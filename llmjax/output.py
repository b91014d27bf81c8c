"""What comes back of a request. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .errors import LlmjaxError
from .message import ChatMessage


class Logprob(NamedTuple):
    """As vLLM's: log-probability, rank from 1, text of the token."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One choice. `logprobs` holds a {token id: Logprob} for each output token;
    `cumulative_logprob` is that of a beam search's completion; `message` is what a chat's `text`
    says.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    message: ChatMessage | None = None


@dataclass
class RequestOutput:
    """All that a request has produced so far (or since the last one, where streamed).

    `prompt_logprobs` is None for the first prompt token, then {token id: Logprob};
    `num_cached_tokens` counts prompt tokens that the prefix cache had when the request began;
    `error` says why it ended before its time, its open choices with finish_reason "abort";
    `engine` is the number of the replica that ran it; `began` is when it first ran
    (`time.monotonic`), 0 before that.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: LlmjaxError | None = None
    engine: int = 0
    began: float = 0.0
