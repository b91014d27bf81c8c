"""Answers in channels: OpenAI's harmony format, which gpt-oss writes.

An answer is a row of messages, `<|channel|>NAME<|message|>TEXT<|end|>`, with `<|start|>assistant`
between. What is said in the channel "analysis" is reasoning, what is said to a function is a call.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from ..structured_outputs import Reasoning
from .reader import Reading, ending_prefix
from .splitter import Splitter
from .syntaxes.gpt_oss import RECIPIENT

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)


class Channels:
    """How reasoning is written in channels."""

    special = (_MESSAGE, *_ENDS, "<|constrain|>")
    can_precede_grammar = False

    def at_end_of(self, prompt: str) -> Reasoning:
        return Reasoning(f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>", False)

    within = at_end_of

    def parser(self, expected: Reasoning) -> ChannelParser:
        return ChannelParser()


class ChannelParser(Splitter):
    """Splits an answer into reasoning and what comes after it.

    Of the latter only messages to functions keep their header, for `GptOss` to read.
    """

    def _read(self) -> Reading[None]:
        reader = self._reader
        while (yield from reader.peek()):
            reader.forget()
            header = yield from reader.attempt(self._header())
            if not isinstance(header, str):
                # No header, or half of one: what there is, is text.
                self._rest += reader.text[:1]
                reader.at = 1
                yield from self._body(reasons=False)
                continue
            called = RECIPIENT.search(header) is not None
            reasons = header.partition(_CHANNEL)[2].startswith("analysis") and not called
            if called:
                self._rest += header
            yield from self._body(reasons)
            if called:
                self._rest += "<|call|>"

    def _header(self) -> Reading[str]:
        """Up to the text of a message, without what separates it from the one before."""
        reader = self._reader
        role = ""
        if (yield from reader.maybe(_START)):
            role = yield from reader.until(_CHANNEL)
        else:
            yield from reader.literal(_CHANNEL)
        channel = yield from reader.until(_MESSAGE)
        recipient = RECIPIENT.search(role)
        to = f" {recipient[0]}" if recipient is not None else ""
        return f"{_CHANNEL}{channel}{to}{_MESSAGE}"

    def _body(self, reasons: bool) -> Reading[None]:
        """The text of a message, as it comes, to its end."""
        reader = self._reader
        while True:
            found = min(
                (at for end in _ENDS if (at := reader.text.find(end, reader.at)) >= 0), default=-1
            )
            stop = found if found >= 0 else len(reader.text)
            if found < 0 and not reader.ended:
                stop -= ending_prefix(reader.text[reader.at :], _ENDS)
            said, reader.at = reader.text[reader.at : stop], stop
            if reasons:
                self._reasoning += said
            else:
                self._rest += said
            if found >= 0:
                for end in ("<|end|>", "<|call|>", "<|return|>"):
                    yield from reader.maybe(end)
                return
            if reader.ended:
                return
            reader.forget()
            yield
