"""What is asked for, and what is known of it on its way. No jax: these cross threads."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

from .checks import require, type_errors
from .errors import InvalidRequestError, LlmjaxError
from .structured_outputs import Reasoning, StructuredOutputs

MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Of all stop strings together: all that may begin one is looked through at each token."""
MAX_BAD_WORDS = 1000
MAX_BAD_CHARS = 16_384
MAX_FLOAT = 3e38
"""The device counts in float32."""
MAX_TIMEOUT = 1e9
MAX_LOGIT_BIAS = 512
"""Entries of `logit_bias` plus ids that `min_tokens` holds back; a row of the device table."""


def longest(
    prompt_len: int, max_tokens: int | None, max_model_len: int, *, param: str = "prompt"
) -> int:
    """Tokens, prompt and output, at which a sequence ends with "length".

    Args:
        max_tokens: None runs to the end of the context.
        param: what the prompt is called in the request at hand.

    Raises:
        InvalidRequestError: the prompt is empty, or what is asked for does not fit.
    """
    if not prompt_len:
        raise InvalidRequestError(f"empty prompt: {param} has no tokens", param=param)
    asked = max_tokens or 1
    if prompt_len + asked <= max_model_len:
        return max_model_len if max_tokens is None else prompt_len + asked
    least = "" if max_tokens else "at least "
    raise InvalidRequestError(
        f"the prompt has {prompt_len} tokens and {least}{asked} are asked for, together "
        f"{prompt_len + asked}; the context holds {max_model_len} (max_model_len)",
        param=param if prompt_len >= max_model_len else "max_tokens",
        code="context_length_exceeded",
    )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; fields and ranges as in vLLM.

    Attributes:
        n: completions of the prompt.
        temperature: 0 is greedy.
        top_k: 0 or -1 keeps all tokens.
        min_p: least probability kept, as a share of the most likely token's.
        seed: makes the request repeatable, whatever else runs; choice i uses seed + i.
        max_tokens: most to generate; none runs to the end of the context.
        min_tokens: end-of-sequence and stop tokens are held back until then.
        logprobs: log-probabilities of the chosen and of this many most likely tokens, of
            the model's own distribution (before penalties, temperature and truncation).
        prompt_logprobs: the same for each prompt token but the first.
        logit_bias: token id -> value added to its logit.
        stop: text that ends the completion; not part of it unless
            `include_stop_str_in_output`.
        kept_special_ids: special tokens that are text, whatever `skip_special_tokens` says.
        structured_outputs: what the output must be; it ends where nothing more is allowed.
        allowed_token_ids: the only tokens to choose from.
        bad_words: what may not be said; of a word of several tokens the last does not come.
        thinking_token_budget: most tokens that a chat's answer may think before the end of its
            reasoning is written for it; the tags are not counted.
        reasoning: how that is written; chats fill it in.

    Raises:
        InvalidRequestError: a value is of the wrong type or out of range; names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_ids: tuple[int, ...] | list[int] = ()
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    thinking_token_budget: int | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        for name, message in type_errors(self):
            raise InvalidRequestError(message, param=name)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "kept_special_ids", tuple(self.kept_special_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        ranges: tuple[tuple[str, float, float, str], ...] = (
            ("temperature", 0, 2, "0 to 2"),
            ("min_p", 0, 1, "0 to 1"),
            ("presence_penalty", -2, 2, "-2 to 2"),
            ("frequency_penalty", -2, 2, "-2 to 2"),
        )
        for name, low, high, allowed in ranges:
            value = getattr(self, name)
            require(low <= value <= high, name, value, allowed)
        top_p, penalty = self.top_p, self.repetition_penalty
        require(0 < top_p <= 1, "top_p", top_p, "above 0 up to 1")
        if not 0 < penalty <= MAX_FLOAT:
            require(False, "repetition_penalty", penalty, f"above 0 up to {MAX_FLOAT:g}")
        integers: tuple[tuple[str, int, int], ...] = (
            ("n", 1, 64),
            ("top_k", 0, 2**31 - 1),
            ("max_tokens", 1, MAX_TOKENS),
            ("min_tokens", 0, 2**31 - 1),
            ("logprobs", 0, 1000),
            ("prompt_logprobs", 0, 1000),
            ("thinking_token_budget", 0, 2**31 - 1),
            ("seed", -(2**63), 2**63 - 1),
        )
        for name, least, most in integers:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                require(False, name, value, f"an integer from {least} to {most}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens ({self.max_tokens})"
            require(False, "min_tokens", self.min_tokens, allowed)

    def _check_lists(self) -> None:
        stop, ids, bias = self.stop or (), self.stop_token_ids or (), self.logit_bias or {}
        ok = len(stop) <= MAX_STOPS and all(stop) and sum(map(len, stop)) <= MAX_STOP_CHARS
        allowed = f"up to {MAX_STOPS} non-empty strings, together of {MAX_STOP_CHARS} characters"
        require(ok, "stop", self.stop, allowed)
        require(self.detokenize or not stop, "stop", self.stop, "none where detokenize is false")
        ok = len(ids) <= MAX_STOPS and all(i >= 0 for i in ids)
        require(ok, "stop_token_ids", ids, f"up to {MAX_STOPS} token ids")
        ok = all(i >= 0 and abs(v) <= 100 for i, v in bias.items())
        require(ok, "logit_bias", bias, "token ids with values from -100 to 100")
        only = self.allowed_token_ids
        ok = only is None or (len(only) > 0 and min(only) >= 0)
        require(ok, "allowed_token_ids", only, "one or more token ids")
        words = self.bad_words or ()
        ok = len(words) <= MAX_BAD_WORDS and all(words) and sum(map(len, words)) <= MAX_BAD_CHARS
        allowed = f"up to {MAX_BAD_WORDS} non-empty strings, together of {MAX_BAD_CHARS} characters"
        require(ok, "bad_words", words, allowed)
        most = MAX_LOGIT_BIAS - 2 * MAX_STOPS
        require(len(bias) <= most, "logit_bias", f"{len(bias)} entries", f"up to {most} entries")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def constrained(self) -> bool:
        """Whether the tokens to choose from depend on more than the model."""
        ruled = self.structured_outputs is not None or self.allowed_token_ids is not None
        return ruled or bool(self.bad_words) or self.thinking_token_budget is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether the choice of a token depends on how often it occurred."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1 or any(penalties)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How a request is treated beside others. Its tokens do not depend on it.

    Attributes:
        priority: a lower number goes first; other than 0 only where the scheduling policy is
            "priority".
        cache_salt: the request shares what the prefix cache has with those of the same salt.
        user: whose share of the machine the request counts on, where users get fair shares.
        timeout: seconds from its arrival after which it fails where it has not ended.
        queue_timeout: seconds from its arrival after which it fails where it has not begun.

    Raises:
        InvalidRequestError: a value is of the wrong type or out of range; names the field.
    """

    priority: int = 0
    cache_salt: str | None = None
    user: str | None = None
    timeout: float | None = None
    queue_timeout: float | None = None

    def __post_init__(self) -> None:
        for name, message in type_errors(self):
            raise InvalidRequestError(message, param=name)
        least, most = -(2**63), 2**63 - 1
        ok = least <= self.priority <= most
        require(ok, "priority", self.priority, f"an integer from {least} to {most}")
        require(self.cache_salt != "", "cache_salt", self.cache_salt, "a non-empty string")
        for name in ("timeout", "queue_timeout"):
            value = getattr(self, name)
            ok = value is None or 0 < value <= MAX_TIMEOUT
            require(ok, name, value, f"seconds, above 0 up to {MAX_TIMEOUT:g}")


class Constraint(Protocol):
    """Follows a sequence's output through what it is bound to; see `llmjax.structured`."""

    forced: list[int]

    def accept(self, token_id: int) -> None: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def is_cut_short(self) -> bool: ...


class Rules(Protocol):
    """What the outputs of a request are bound to, made ready."""

    def start(self, room: int) -> Constraint: ...


@dataclass
class Request:
    """One prompt on its way through the engine, by token ids.

    Attributes:
        rules: what `params` bind the outputs to, beyond numbers.
        eos_token_ids: the union of all end-of-sequence ids that the model declares.
        kv_key: what keys and values depend on beside tokens and positions: requests share
            pages where it is the same.
        engine: the number of the replica that runs it.
        began: when the first step was dispatched that computes some of it (`time.monotonic`);
            0 before that.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    options: RequestOptions = RequestOptions()
    kv_key: Hashable = None
    engine: int = 0
    rules: Rules | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    began: float = 0.0


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One choice of a request as the scheduler sees it.

    Attributes:
        tokens: prompt, then output ids that have been committed.
        arrival, turn: when it came and when it first began to run, counted from 1.
        num_pending: output tokens that steps in flight will add; known to the device only.
        num_computed: positions whose KV is in pages, or will be by the steps in flight.
        block_tables: of each group of layers, page ids in order of position; -1 where a page
            lies behind the window or was evicted.
        kept_pages: of each group, the pages that stand for what is kept of evicted tokens.
        num_dropped: tokens that have left, so that later ones lie so much nearer to the start.
        num_cached_tokens: of the prompt, those that the cache had.
        is_held: it cannot begin, as its prompt's pages are to come from a prefill worker.
        num_brought: tokens of its prompt that a worker has computed for it.
        slot: row of the device's per-sequence state while running, else -1.
        in_flight: steps dispatched that include this sequence and are not committed.
        started: when it first ran (`time.monotonic`).
        constraint: what its output must be; knows all of it that is in `tokens`.
    """

    request: Request
    index: int
    seed: int
    tokens: list[int]
    arrival: int = 0
    turn: int = 0
    status: Status = Status.WAITING
    num_pending: int = 0
    num_computed: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    kept_pages: list[list[int]] = field(default_factory=list)
    num_dropped: int = 0
    num_cached_tokens: int = 0
    is_held: bool = False
    num_brought: int = 0
    slot: int = -1
    in_flight: int = 0
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    started: float = 0.0
    constraint: Constraint | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known or pending; the next step may compute up to this position."""
        return len(self.tokens) + self.num_pending

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def page_lists(self) -> list[list[int]]:
        """All its pages, in lists, and -1 where there is none."""
        return [*self.block_tables, *self.kept_pages]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position.

    Attributes:
        token_id: the token that stands there, with its `logprob` and `rank` (from 1).
        top_ids, top_logprobs: the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass
class SequenceDelta:
    """What one committed step says about one sequence (ids only).

    Attributes:
        num_cached_tokens: of its prompt, those that the prefix cache had.
        error: why the request failed; then this is the sequence's last delta.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: LlmjaxError | None = None
