"""From the engine's token ids to what a caller sees: text, stop strings, log-probabilities."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import LlmjaxError
from ..output import CompletionOutput, Logprob, RequestOutput
from ..request import FinishReason, Request, SamplingParams, SequenceDelta, TokenLogprobs
from ..tokenizer import IncrementalDetokenizer, Tokenizer
from .trace import NoTrace


@dataclass
class _Choice:
    """One choice so far; `text` is all that is certain, `held` may yet become a stop string.

    `token_ends` holds, for each token, the characters of text and held up to its end.
    """

    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    held: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_ends: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sent_chars: int = 0
    sent_tokens: int = 0
    told_finish: bool = False


@dataclass
class _RequestState:
    request: Request
    prompt: str | None
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    prompt_sent: bool = False
    num_cached_tokens: int = 0
    error: LlmjaxError | None = None

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.choices)


class OutputProcessor:
    """Turns `SequenceDelta`s into `RequestOutput`s. One thread at a time may use it.

    Args:
        trace: told what it takes.
    """

    def __init__(self, tokenizer: Tokenizer, trace: NoTrace | None = None):
        self._tokenizer = tokenizer
        self._trace = trace or NoTrace()
        self._states: dict[str, _RequestState] = {}

    def add(self, request: Request, prompt: str | None = None) -> None:
        """Begins to follow a request; `prompt` is its text, where there is one."""
        params = request.params
        choices = [_Choice(self._detokenizer(request)) for _ in range(params.n)]
        wanted = params.prompt_logprobs is not None
        self._states[request.id] = _RequestState(
            request, prompt, choices, [None] if wanted else None
        )

    def remove(self, request_id: str) -> None:
        """Forgets a request."""
        self._states.pop(request_id, None)

    def process(self, deltas: Iterable[SequenceDelta]) -> tuple[list[str], list[tuple[str, int]]]:
        """Takes in a step's deltas.

        Returns:
            Ids of the requests with news, and the (request id, choice) pairs that a stop
            string ended and that the engine must stop.
        """
        touched: dict[str, None] = {}
        stopped: list[tuple[str, int]] = []
        began, tokens = time.perf_counter(), 0
        for delta in deltas:
            state = self._states.get(delta.request_id)
            if state is None:
                continue
            choice = state.choices[delta.index]
            if choice.finish_reason is not None:
                continue
            touched[delta.request_id] = None
            state.error = delta.error or state.error
            tokens += len(delta.token_ids)
            # A stop string ends a choice at the token that completes it.
            parts = _one_by_one(delta) if state.request.params.stop else [delta]
            for part in parts:
                if choice.finish_reason is None:
                    self._take(state, choice, part)
            if isinstance(choice.stop_reason, str) and delta.finish_reason is None:
                stopped.append((delta.request_id, delta.index))
        if touched:
            self._trace.detokenised(began, tokens)
        return list(touched), stopped

    def is_finished(self, request_id: str) -> bool:
        """Whether all choices have ended."""
        return self._states[request_id].finished

    def output(self, request_id: str, *, delta: bool) -> RequestOutput:
        """The request's output: all of it, or what is new since the last delta.

        A delta's `outputs` are empty where all that is new may yet become a stop string; the
        prompt's log-probabilities come with the first that are not. A finished request is
        forgotten once its output has been taken.
        """
        state = self._states[request_id]
        choices = range(len(state.choices))
        outputs = [self._completion(i, state.choices[i], delta) for i in choices]
        if delta:
            outputs = [o for o in outputs if o.text or o.token_ids or o.finish_reason]
        prompt_logprobs = state.prompt_logprobs
        if delta and (state.prompt_sent or not outputs):
            prompt_logprobs = None
        state.prompt_sent |= bool(outputs)
        if state.finished:
            del self._states[request_id]
        return RequestOutput(
            request_id=request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=outputs,
            finished=state.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
            engine=state.request.engine,
            began=state.request.began,
        )

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        if not request.params.detokenize:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
            kept_ids=request.params.kept_special_ids,
        )

    def _take(self, state: _RequestState, choice: _Choice, delta: SequenceDelta) -> None:
        params = state.request.params
        if not delta.index:
            state.num_cached_tokens = delta.num_cached_tokens
        if state.prompt_logprobs is not None:
            state.prompt_logprobs += [self._logprobs(row) for row in delta.prompt_logprobs]
        choice.token_ids += delta.token_ids
        choice.logprobs += [self._logprobs(row) for row in delta.logprobs]
        # The token that ends a completion is not part of its text.
        shown = len(delta.token_ids)
        if delta.finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
            ends = {*state.request.eos_token_ids, *(params.stop_token_ids or ())}
            # Structured output may also end with what belongs to it.
            shown -= bool(delta.token_ids) and delta.token_ids[-1] in ends
        before, text = len(choice.text) + len(choice.held), ""
        for i, token in enumerate(delta.token_ids):
            if choice.detokenizer is not None and i < shown:
                text += choice.detokenizer.push([token])
            choice.token_ends.append(before + len(text))
        if choice.detokenizer is not None and delta.finish_reason is not None:
            text += choice.detokenizer.finish()
        self._append(choice, text, params, ended=delta.finish_reason is not None)
        if choice.finish_reason is None and delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason.value
            choice.stop_reason = delta.stop_reason

    def _append(self, choice: _Choice, text: str, params: SamplingParams, *, ended: bool) -> None:
        stops = params.stop or ()
        choice.held += text
        if stops and len(choice.token_ids) >= params.min_tokens:
            found = _first_stop(choice.held, stops)
            if found is not None:
                start, stop = found
                end = start + len(stop) if params.include_stop_str_in_output else start
                choice.text += choice.held[:end]
                choice.held = ""
                choice.finish_reason = FinishReason.STOP.value
                choice.stop_reason = stop
                return
        keep = 0 if ended else _stop_prefix_len(choice.held, stops)
        certain = len(choice.held) - keep
        choice.text += choice.held[:certain]
        choice.held = choice.held[certain:]

    def _completion(self, index: int, choice: _Choice, delta: bool) -> CompletionOutput:
        if delta and choice.told_finish:
            return CompletionOutput(index=index, text="", token_ids=[])
        text_from, token_from, token_to = 0, 0, len(choice.token_ids)
        if delta:
            text_from, token_from = choice.sent_chars, choice.sent_tokens
            if choice.finish_reason is None:
                # Tokens leave with their text: not while it may become a stop string.
                token_to = bisect_right(choice.token_ends, len(choice.text))
            choice.sent_chars, choice.sent_tokens = len(choice.text), token_to
            choice.told_finish = choice.finish_reason is not None
        return CompletionOutput(
            index=index,
            text=choice.text[text_from:],
            token_ids=choice.token_ids[token_from:token_to],
            logprobs=choice.logprobs[token_from:token_to] if choice.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(self, row: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text
        out = {row.token_id: Logprob(row.logprob, row.rank, text(row.token_id))}
        for rank, (i, value) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), 1):
            out.setdefault(i, Logprob(value, rank, text(i)))
        return out


def _one_by_one(delta: SequenceDelta) -> list[SequenceDelta]:
    """A delta in parts, each of a token."""
    if len(delta.token_ids) < 2:
        return [delta]
    parts = [
        SequenceDelta(delta.request_id, delta.index, [token], delta.logprobs[i : i + 1])
        for i, token in enumerate(delta.token_ids)
    ]
    parts[0].prompt_logprobs = delta.prompt_logprobs
    for part in parts:
        part.num_cached_tokens = delta.num_cached_tokens
    parts[-1].finish_reason, parts[-1].stop_reason = delta.finish_reason, delta.stop_reason
    return parts


def _first_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """Where the first stop string begins, and which: the one whose match ends first."""
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    _, at, stop = min(found)
    return at, stop


def _stop_prefix_len(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if stop.startswith(text[-size:]):
                longest = size
                break
    return longest
