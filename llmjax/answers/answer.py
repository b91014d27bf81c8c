"""From an answer's text to the message that it is, as it comes."""

from __future__ import annotations

from collections.abc import Sequence

from ..message import ChatMessage
from ..output import CompletionOutput
from .calls import CallParser
from .splitter import Splitter


class AnswerParser:
    """Reads one answer.

    Args:
        reasoning, calls: take these out of the text, where there may be any.
        reasoning_end_id: the token that ends the reasoning.

    Attributes:
        num_calls: that were given out, at least their beginnings.
        num_reasoning_tokens: of the answer so far; None where they cannot be told apart.
    """

    def __init__(
        self,
        reasoning: Splitter | None,
        calls: CallParser | None,
        reasoning_end_id: int | None = None,
    ):
        self._reasoning, self._calls = reasoning, calls
        self._end_id = reasoning_end_id
        self._thinks = reasoning is not None and reasoning_end_id is not None
        self._num_before_end = 0
        self._has_reasoned = False
        self.num_calls = self._num_whole = 0

    @property
    def num_reasoning_tokens(self) -> int | None:
        if self._reasoning is None:
            return 0
        if self._end_id is None:
            return None
        return self._num_before_end if self._has_reasoned else 0

    def read(self, choice: CompletionOutput) -> None:
        """Fills in the message of a choice, or what is new of it, and why it ended."""
        ended = choice.finish_reason is not None
        choice.message = self.push(choice.text, choice.token_ids, ended=ended)
        if choice.finish_reason == "stop" and self.num_calls == self._num_whole > 0:
            choice.finish_reason = "tool_calls"

    def push(self, text: str, token_ids: Sequence[int], *, ended: bool) -> ChatMessage:
        """What is new with `text`, which was made of `token_ids`; the rest where `ended`."""
        if self._thinks:
            self._thinks = self._end_id not in token_ids
            new = len(token_ids) if self._thinks else list(token_ids).index(self._end_id) + 1  # type: ignore[arg-type]
            self._num_before_end += new
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            if ended:
                more, rest = self._reasoning.finish()
                reasoning, text = reasoning + more, text + rest
        self._has_reasoned |= bool(reasoning)
        if self._calls is None:
            return ChatMessage(text, reasoning)
        news = self._calls.push(text)
        if ended:
            news.add(self._calls.finish())
        news.reasoning = reasoning
        self.num_calls += sum(call.begins for call in news.tool_calls)
        self._num_whole += sum(call.ends for call in news.tool_calls)
        return news
