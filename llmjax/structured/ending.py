"""How a bound output comes to its end before its tokens are used up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

_LONGEST = 128
"""Tokens of an end that is looked for."""
_WATCHED = 64
"""Tokens to spare up to which it is looked how far the end is, and how that changes."""
_CLOSING = '}]",:0tfn{['
"""What JSON may go on with, first what leads to its end soonest."""
_FILLING = "x0"
_STRUCTURE = frozenset(b'{}[]",:<')
_BEHIND_TEXT = ",:}]"
_MOST_GUESSES = 16
"""Times that a text which must not end is gone on with by whatever may come."""


class Endings:
    """Finds ends of outputs in JSON, and in much else where hardly anything is left to choose.

    Args:
        tokens: the bytes of each token.
        encode: a text's tokens.
    """

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], list[int]]):
        self._tokens, self._encode = tokens, encode
        self._ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if len(token) == 1 and token.isascii():
                self._ids.setdefault(token.decode(), i)
        self._single = set(self._ids.values())

    def is_plain(self, token_id: int) -> bool:
        """Whether it opens or closes nothing."""
        return _STRUCTURE.isdisjoint(self._tokens[token_id])

    def start(self, room: int) -> Ending:
        """That of one output, before its first token, with room for so many."""
        return Ending(self, room)

    def find(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Tokens behind which an output may end, as few as there need be: lists, objects and texts
        are closed, and what a schema still requires is as empty as it may be.

        Args:
            matcher: where the output is; it is left as it is.
            most: tokens that there is room for.

        Returns:
            None where no such end was found, which there may be all the same.
        """
        start, matcher = matcher, matcher.deep_copy()
        way: list[int] = []
        guesses = 0
        while not matcher.is_accepting():
            forced = matcher.compute_ff_tokens()
            if not forced:
                token = self._next(matcher)
                if token is None:
                    token = self._any(matcher, guesses) if guesses < _MOST_GUESSES else None
                    guesses += 1
                if token is None:
                    return None
                forced = [token]
            way += forced
            if len(way) > _LONGEST or not matcher.consume_tokens(forced):
                return None
        way = self._as_spoken(start, way)
        return way if len(way) <= most else None

    def _as_spoken(self, matcher: LLMatcher, way: list[int]) -> list[int]:
        """In the tokens that the tokenizer has for it, which are fewer."""
        try:
            spoken = self._encode(b"".join(self._tokens[i] for i in way).decode())
        except UnicodeDecodeError:
            return way  # it begins in the middle of a character
        is_same = matcher.validate_tokens(spoken) == len(spoken) < len(way)
        return spoken if is_same else way

    def _next(self, matcher: LLMatcher) -> int | None:
        if self._closes_text(matcher):
            return self._ids['"']
        # Nothing but a text goes on with either: one that must be longer.
        is_text = self._allows(matcher, "}") and self._allows(matcher, "]")
        return next(
            (self._ids[c] for c in (_FILLING if is_text else _CLOSING) if self._allows(matcher, c)),
            None,
        )

    def _allows(self, matcher: LLMatcher, text: str) -> bool:
        """Whether these characters may come next, each a token of its own."""
        ids = [self._ids.get(char, -1) for char in text]
        return -1 not in ids and matcher.validate_tokens(ids) == len(ids)

    def _closes_text(self, matcher: LLMatcher) -> bool:
        """Whether a quotation mark may come next, and ends a text."""
        if not self._allows(matcher, '"'):
            return False
        if any(self._allows(matcher, '"' + char) for char in 'a0"'):
            return False  # it begins one
        if any(self._allows(matcher, '"' + char) for char in _BEHIND_TEXT):
            return True
        behind = matcher.deep_copy()
        return behind.consume_token(self._ids['"']) and behind.is_accepting()

    def _any(self, matcher: LLMatcher, turn: int) -> int | None:
        """A character that may come next, or else a token; another at each turn, as one may lead
        round and round."""
        mask = np.zeros((1, -(-len(self._tokens) // 32)), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        some = sorted(self._single.intersection(allowed.tolist())) or allowed.tolist()
        return some[turn % len(some)] if some else None


class Ending:
    """Watches how many tokens one output has left, and ends it in time.

    That is at the last moment: what the model would say may end by itself until then. How much
    further from its end a single token has brought the output lately, as one that begins an object
    in a list does, is kept to spare.

    It is left alone, to be cut off, where its end would take more than half of all its tokens:
    what the model says first is worth more than what nobody said.

    Attributes:
        is_due: it has begun to end.
    """

    def __init__(self, endings: Endings, room: int):
        self._endings, self._left, self._most = endings, room, room // 2
        self._length: int | None = None
        self._look_at, self._spare = _LONGEST, 2
        self._is_known = self.is_due = False

    def accept(self, token_id: int) -> None:
        """Goes on by a token."""
        self._left -= 1
        # In the middle of a text or a number an end stays what it is.
        self._is_known &= self._endings.is_plain(token_id)

    def find(self, matcher: LLMatcher) -> list[int]:
        """The tokens of the end, if it is time; the output is complete behind them."""
        if self._left > self._look_at or (self._is_known and not self._is_near):
            return []
        before = self._length
        way = self._endings.find(matcher, min(self._left, self._most))
        self._length, self._is_known = (None, False) if way is None else (len(way), True)
        self._look_at = self._left // 2 if way is None else len(way) + _WATCHED
        if before is not None and self._length is not None:
            self._spare = max(self._spare, self._length - before)
        if not way or not self._is_near:
            return []
        self.is_due = True
        return way

    @property
    def _is_near(self) -> bool:
        return self._length is not None and self._left <= self._length + self._spare
