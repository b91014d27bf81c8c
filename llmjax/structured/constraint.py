"""Where one sequence is in its grammar, and what may come next."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ..errors import StructuredOutputError

_executor: LLExecutor | None = None
_TOGETHER = 4
"""Fewer masks are made faster by one thread than shared out."""


class Constraint:
    """Follows the tokens of a sequence through its grammar.

    Attributes:
        forced: the tokens that come next, whatever the model would say; empty where it has a
            choice. They spell what the grammar leaves no choice of as the tokenizer would.
    """

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.forced: list[int] = matcher.compute_ff_tokens()

    def accept(self, token_id: int) -> None:
        """Goes on by a token.

        Raises:
            StructuredOutputError: the grammar has no such token here, or has become too complex
                to be followed.
        """
        if not self.matcher.consume_token(token_id):
            raise StructuredOutputError(
                "the structured output cannot go on: "
                + (self.matcher.get_error() or f"token {token_id} is not allowed").splitlines()[0]
            )
        if self.forced and self.forced[0] == token_id:
            self.forced = self.forced[1:]
        else:
            self.forced = []
        self.forced = self.forced or self.matcher.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        """Nothing more is allowed."""
        return self.matcher.is_stopped()


def fill_masks(
    masks: Int[np.ndarray, "S W"], constraints: Iterable[tuple[int, Constraint]]
) -> None:
    """Sets in each (row, constraint)'s row the bits of the tokens that may come next."""
    global _executor
    matchers = []
    for row, constraint in constraints:
        if constraint.forced:
            word, bit = divmod(constraint.forced[0], 32)
            masks[row, word] = np.uint32(1 << bit).view(np.int32)
        else:
            matchers.append((constraint.matcher, row))
    if len(matchers) < _TOGETHER:
        for matcher, row in matchers:
            fill_next_token_bitmask(matcher, masks, row)
        return
    if _executor is None:
        _executor = LLExecutor()
    fill_next_token_bitmask_par(_executor, matchers, masks)
