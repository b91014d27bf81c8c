"""How long a model may think: where its budget is used up, the end of its reasoning is written."""

from __future__ import annotations

from dataclasses import dataclass

from ..structured_outputs import Reasoning
from ..tokenizer import Tokenizer
from ..tokenizer.detokenizer import TextStream

MOST_REST = 3
"""Bytes behind the first one of a character."""


@dataclass(frozen=True)
class ThinkingBudget:
    """A bound on the tokens between two tags.

    Attributes:
        tags: of the reasoning, which stands at the beginning of an answer.
        tokens: behind the opening tag, whoever wrote that; the closing one is not counted. A
            character that is begun in them is finished.
    """

    tags: Reasoning
    tokens: int
    tokenizer: Tokenizer

    def start(self) -> Thinking:
        """That of one answer, before its first token."""
        return Thinking(self)

    @property
    def end_ids(self) -> list[int]:
        """What ends the reasoning."""
        return self.tokenizer.encode(self.tags.end, add_special_tokens=False)


class Thinking:
    """Follows the tokens of one answer through its reasoning, as text: that is what clients read.

    Attributes:
        forced: the tokens that come next, as the budget is used up.
    """

    def __init__(self, budget: ThinkingBudget):
        self._budget = budget
        self._text = TextStream(budget.tokenizer.pieces, frozenset())
        self._inside, self._is_over = budget.tags.is_open, False
        self._left = budget.tokens
        self._tail = ""
        self.forced: list[int] = []
        self._force()

    def accept(self, token_id: int) -> None:
        """Goes on by a token."""
        if self._is_over:
            return
        self._tail += self._text.push(token_id)
        if self._inside:
            self._left -= 1
        else:
            self._look_for_begin()
        end = self._budget.tags.end
        if self._inside:
            self._is_over = end in self._tail
            self._tail = self._tail[1 - len(end) :] if len(end) > 1 else ""
        self._force()

    def _look_for_begin(self) -> None:
        """The opening tag comes first, but for space, or not at all."""
        begin = self._budget.tags.begin
        self._tail = self._tail.lstrip()
        self._inside = self._tail.startswith(begin)
        if self._inside:
            self._tail = self._tail[len(begin) :]
        else:
            self._is_over = not begin.startswith(self._tail)

    def _force(self) -> None:
        self.forced = []
        if not self._inside or self._is_over or self._left > 0:
            return
        if self._text.decoder.getstate()[0] and self._left > -MOST_REST:
            return  # no grammar goes on in the middle of a character
        end = self._budget.tags.end
        # The model may have begun to write the tag itself.
        begun = next(n for n in range(len(end) - 1, -1, -1) if self._tail.endswith(end[:n]))
        encode = self._budget.tokenizer.encode
        self.forced = encode(end[begun:], add_special_tokens=False)
