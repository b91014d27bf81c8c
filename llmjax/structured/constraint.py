"""Where one sequence is in its grammar, and what may come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ..errors import StructuredOutputError
from .ending import Ending
from .thinking import Thinking

_executor: LLExecutor | None = None
_TOGETHER = 4
"""Fewer masks are made faster by one thread than shared out."""

_NOTHING_LEFT = "allowed_token_ids, bad_words and the grammar together leave no token"

BadWords = dict[tuple[int, ...], list[int]]
"""Tokens that must not come next, by the ones before them."""


class Constraint:
    """Follows the tokens of a sequence through what they are bound to.

    Args:
        matcher: at the beginning of its grammar.
        allowed: bits of the only tokens that may come.
        bad_words: what may not be said.
        thinking: at the beginning of the answer, where its reasoning is bounded.
        ending: brings it to its grammar's end before its tokens are used up.

    Attributes:
        forced: the tokens that come next, whatever the model would say; empty where it has a
            choice. They spell what the grammar leaves no choice of as the tokenizer would, or the
            end of a reasoning that has used up its budget, or of an output that is to be ended.
    """

    def __init__(
        self,
        matcher: LLMatcher | None = None,
        allowed: Int[np.ndarray, " W"] | None = None,
        bad_words: BadWords | None = None,
        thinking: Thinking | None = None,
        ending: Ending | None = None,
    ):
        self.matcher, self.allowed, self._bad_words = matcher, allowed, bad_words or {}
        self._thinking, self._ending = thinking, ending
        self._longest = max(map(len, self._bad_words), default=0)
        self._last: list[int] = []
        self.forced: list[int] = self._find_forced()

    def accept(self, token_id: int) -> None:
        """Goes on by a token.

        Raises:
            StructuredOutputError: there is no such token here, as nothing was left to choose
                from, or the grammar has become too complex to be followed.
        """
        error = None
        if self.matcher is not None and self.matcher.is_error():
            error = self.matcher.get_error()  # it could say nothing of what may come
        elif not self._allows(token_id):
            error = _NOTHING_LEFT
        elif self.matcher is not None and not self.matcher.consume_token(token_id):
            is_narrowed = self.allowed is not None or self._bad_words
            error = _NOTHING_LEFT if is_narrowed else self.matcher.get_error()
        if error is not None:
            raise StructuredOutputError(f"the output cannot go on: {error.splitlines()[0]}")
        if self._longest:
            self._last = [*self._last, token_id][-self._longest :]
        if self._thinking is not None:
            self._thinking.accept(token_id)
        if self._ending is not None:
            self._ending.accept(token_id)
        self.forced = self.forced[1:] or self._find_forced()

    @property
    def is_complete(self) -> bool:
        """Nothing more is allowed."""
        has_ended = self._ending is not None and self._ending.is_due and not self.forced
        return self.matcher is not None and (self.matcher.is_stopped() or has_ended)

    @property
    def is_cut_short(self) -> bool:
        """It was brought to its end, as its tokens would not have lasted for more."""
        return self._ending is not None and self._ending.is_cut_short

    def narrow(self, mask: Int[np.ndarray, " W"]) -> None:
        """Takes out of a mask what the grammar does not know of."""
        if self.forced:
            word, bit = divmod(self.forced[0], 32)
            mask[:] = 0
            mask[word] = np.uint32(1 << bit).view(np.int32)
        elif self._ending is not None and self._ending.only is not None:
            mask &= as_bits(self._ending.only, len(mask))
        if self.allowed is not None:
            mask &= self.allowed
        bits = mask.view(np.uint32)
        banned = () if self.forced or self._ending is None else self._ending.banned
        for token in (*banned, *self._bad_next()):
            bits[token // 32] &= ~np.uint32(1 << token % 32)

    def _allows(self, token: int) -> bool:
        if self.allowed is not None and not self.allowed[token // 32] >> token % 32 & 1:
            return False
        return token not in self._bad_next()

    def _bad_next(self) -> set[int]:
        last = tuple(self._last)
        return {
            token
            for before, tokens in self._bad_words.items()
            if not before or last[-len(before) :] == before
            for token in tokens
        }

    def _find_forced(self) -> list[int]:
        if self._thinking is not None and self._thinking.forced:
            return self._thinking.forced
        if self.matcher is None or self.allowed is not None or self._bad_words:
            return []  # the grammar alone does not say what is left
        if self._ending is not None:
            if self._ending.is_due:
                return []
            if end := self._ending.look(self.matcher):
                return end
        return self.matcher.compute_ff_tokens()


def fill_masks(
    masks: Int[np.ndarray, "S W"],
    constraints: Iterable[tuple[int, Constraint]],
    *,
    parallel: bool,
) -> None:
    """Sets in each (row, constraint)'s row the bits of the tokens that may come next.

    Args:
        parallel: have other threads make some of many masks, where there are processors for them
            that nothing else keeps busy.
    """
    global _executor
    constraints = list(constraints)
    matchers: list[tuple[LLMatcher, int]] = []
    for row, constraint in constraints:
        if constraint.matcher is None or constraint.forced:
            masks[row] = -1
        else:
            matchers.append((constraint.matcher, row))
    if not parallel or len(matchers) < _TOGETHER:
        for matcher, row in matchers:
            fill_next_token_bitmask(matcher, masks, row)
    else:
        if _executor is None:
            _executor = LLExecutor()
        fill_next_token_bitmask_par(_executor, matchers, masks)
    for row, constraint in constraints:
        constraint.narrow(masks[row])


def as_bits(token_ids: Sequence[int], num_words: int) -> Int[np.ndarray, " W"]:
    """A mask of some tokens; there are no others than it has bits for."""
    bits = np.zeros(num_words * 32, bool)
    bits[[i for i in token_ids if i < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
