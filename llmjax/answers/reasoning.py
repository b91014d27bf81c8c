"""From an answer's text to what the model thought and what it says, as it comes."""

from __future__ import annotations

from dataclasses import dataclass

from ..structured_outputs import Reasoning
from .channels import Channels
from .reader import Reading, ending_prefix
from .splitter import Splitter


@dataclass(frozen=True)
class Tags:
    """Reasoning stands between `begin` and `end`, at the beginning of an answer."""

    begin: str
    end: str
    can_precede_grammar = True

    @property
    def special(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return self.begin, self.end

    def parser(self, expected: Reasoning) -> ReasoningParser:
        return ReasoningParser(expected)

    def at_end_of(self, prompt: str) -> Reasoning | None:
        """What an answer to a prompt may begin with; None where the prompt has ended it.

        Only what a chat template writes counts, at the very end: a user may write tags too.
        """
        bare = prompt.rstrip()
        if bare.endswith(self.end):
            return None
        return Reasoning(self.begin, self.end, bare.endswith(self.begin))

    def within(self, answer: str) -> Reasoning | None:
        """What an answer may go on with of which there is a part."""
        if self.end in answer or (answer.strip() and self.begin not in answer):
            return None
        return Reasoning(self.begin, self.end, self.begin in answer)


REASONING: dict[str, Tags | Channels] = {
    "deepseek_r1": Tags("<think>", "</think>"),
    "gpt_oss": Channels(),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "qwen3": Tags("<think>", "</think>"),
}
"""By the names of `--reasoning-parser`."""


_SIGNS = {"gpt_oss": "<|channel|>", "deepseek_r1": "</think>", "mistral": "[/THINK]"}


def detect_reasoning(template: str) -> Tags | Channels | None:
    """What a chat template writes reasoning with, or looks for, if it does."""
    return next((REASONING[name] for name, sign in _SIGNS.items() if sign in template), None)


class ReasoningParser(Splitter):
    """Splits a text into reasoning and what comes after it. Space around the tags is dropped.

    Args:
        expected: its tags, and whether the prompt has opened it.
    """

    def __init__(self, expected: Reasoning):
        super().__init__()
        self._tags = expected
        self.is_over = False

    def _go_on(self) -> tuple[str, str]:
        reasoning, rest = super()._go_on()
        if self.is_over:
            rest += self._reader.text[self._reader.at :]
            self._reader.at = len(self._reader.text)
            self._reader.forget()
        return reasoning, rest

    def _read(self) -> Reading[None]:
        reader, inside = self._reader, self._tags.is_open
        space = yield from self._space()
        if (yield from reader.maybe(self._tags.begin)):
            yield from self._space()
            inside = True
        if inside:
            yield from self._think()
            yield from self._space()
        else:
            self._rest += space
        self.is_over = True

    def _space(self) -> Reading[str]:
        return (yield from self._reader.space())

    def _think(self) -> Reading[None]:
        """Reads to the end tag, or to the text's end, where the tag does not come."""
        reader, end = self._reader, self._tags.end
        while True:
            at = reader.text.find(end, reader.at)
            stop = at if at >= 0 else len(reader.text)
            if at < 0 and not reader.ended:
                stop -= ending_prefix(reader.text[reader.at :], (end,))
            said = reader.text[reader.at : stop].rstrip()
            self._reasoning += said
            reader.at += len(said)
            if at >= 0:
                reader.at = at + len(end)
                return
            if reader.ended:
                reader.at = len(reader.text)
                return
            reader.forget()
            yield
