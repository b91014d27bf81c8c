"""How a bound output comes to its end before its tokens are used up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

LEAST_ROOM = 128
"""Tokens of an output that is brought to its end: of fewer each counts, also what looking costs."""
_LONGEST, _SHORT = 256, 32
"""Characters of an end that is looked for, tokens of one that is looked for behind others too."""
_FIRST_LOOK = 128
"""Tokens before the last one when it is first looked how far the end is."""
_WATCHED = 16
"""Tokens to spare up to which it is watched how far the end is."""
_SPARE = 2
"""Tokens before the last moment when a text is closed."""
_REST, _REST_OF_ESCAPE = 3, 5
"""Tokens that it may take to finish a character, and one that is escaped."""
_MOST_TRIED, _MOST_GUESSES, _MOST_ALIKE = 64, 16, 2
"""Kinds of tokens that are tried one by one; times that whatever may come is gone on with, and that
a character follows itself before."""
_CLOSING = '}]",:0tfn{['
"""What JSON may go on with, first what leads to its end soonest."""
_FILLING = "x0"
_STRUCTURE = frozenset(b'{}[]",:<\\')
_ANYTHING = "x@@. "
"""What a text that is bound to nothing may go on with."""
_BEHIND_TEXT = ",:}]"
_LEADING_ON = "@.:/TZ-"
"""What formats of texts go on with."""
_SPACE = b" \t\r\n"
_BEGINS_MORE = re.compile(rb'"\s*([^"]*[,{\[:].*|"[^"]*)', re.DOTALL)
"""A text's end, and the beginning of what comes behind it."""


class EndFinder:
    """Finds ends of outputs in JSON, and in much else where hardly anything is left to choose.

    Args:
        tokens: the bytes of each token.
        encode: the tokens of a text within another.
    """

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], list[int]]):
        self._tokens, self._encode = tokens, encode
        self._ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if len(token) == 1 and token.isascii():
                self._ids.setdefault(token.decode(), i)
        self._closers = [self._ids[char] for char in '"}]' if char in self._ids]
        self._single = np.array(sorted(self._ids.values()), np.int64)
        compound = (i for i, token in enumerate(tokens) if _BEGINS_MORE.search(token))
        self._compound = np.fromiter(compound, np.int64)
        self._escapes = [i for i, token in enumerate(tokens) if b"\\" in token]
        self._parts = [i for i, token in enumerate(tokens) if not _is_whole(token)]

    def is_plain(self, token_id: int) -> bool:
        """Whether it is whole characters of a text, none of which opens or closes anything."""
        token = self._tokens[token_id]
        return _is_whole(token) and _STRUCTURE.isdisjoint(token)

    def shortest(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Tokens behind which an output may end: lists, objects and texts are closed, and what a
        schema still requires is as empty as it may be.

        Args:
            matcher: where the output is; it is left as it is.
            most: tokens that there is room for.

        Returns:
            None where no such end was found, which there may be all the same.
        """
        matcher, used = matcher.deep_copy(), Counter[str]()
        way: list[int] = []
        alike = guesses = 0
        while not matcher.is_accepting():
            forced = matcher.compute_ff_tokens()
            if not forced:
                token = self._next(matcher)
                is_row = token is not None and way[-1:] == [token]
                alike = alike + 1 if is_row and token not in self._closers else 0
                is_stuck = alike >= _MOST_ALIKE and not self._allows(matcher, _ANYTHING)
                if (token is None or is_stuck) and guesses < _MOST_GUESSES:
                    token, guesses = self._least_used(matcher, used), guesses + 1
                if token is None:
                    return None
                forced = [token]
            way += forced
            if len(way) > _LONGEST or not matcher.consume_tokens(forced):
                return None
        way = self._as_spoken(way)
        return way if len(way) <= most else None

    def that_fit(self, matcher: LLMatcher, most: int) -> tuple[int, list[int]]:
        """How many tokens may come next, and those of them behind which there is an end within
        `most`; where they are of too many kinds to try them, as within a text, none."""
        kinds: dict[bytes, list[int]] = {}
        allowed = self._allowed(matcher)
        for token in map(int, allowed):  # within a text hardly any of them are looked at
            kinds.setdefault(self._tokens[token].translate(None, _SPACE), []).append(token)
            if len(kinds) > _MOST_TRIED:
                return len(allowed), []
        return len(allowed), self._that_fit(matcher, kinds, most)

    def that_take_more(self, spare: int) -> list[int]:
        """Tokens that begin a character which it may take more than `spare` to finish."""
        return (self._parts if spare <= _REST else []) + (
            self._escapes if spare <= _REST_OF_ESCAPE else []
        )

    def that_go_too_far(self, matcher: LLMatcher, most: int) -> list[int]:
        """Tokens that end a text and begin what has no end within `most`."""
        kinds: dict[bytes, list[int]] = {}
        allowed = np.intersect1d(self._allowed(matcher), self._compound).tolist()
        for token in allowed:
            piece = self._tokens[token]
            behind = piece[piece.index(b'"') :].translate(None, _SPACE)
            kinds.setdefault(behind, []).append(token)
        fits = self._that_fit(matcher, kinds, most)
        return sorted(set(allowed) - set(fits))

    def _that_fit(self, matcher: LLMatcher, kinds: dict[bytes, list[int]], most: int) -> list[int]:
        fits = []
        for tokens in kinds.values():
            behind = matcher.deep_copy()
            if behind.consume_token(tokens[0]) and (
                behind.is_stopped() or self.shortest(behind, most) is not None
            ):
                fits += tokens
        return fits

    def _as_spoken(self, way: list[int]) -> list[int]:
        """In the tokens that the tokenizer has for it, which are fewer."""
        text = b"".join(self._tokens[i] for i in way)
        try:
            spoken = self._encode(text.decode())
        except UnicodeDecodeError:
            return way  # it begins in the middle of a character
        is_same = b"".join(self._tokens[i] for i in spoken) == text
        return spoken if is_same and len(spoken) < len(way) else way

    def _next(self, matcher: LLMatcher) -> int | None:
        if self._closes_text(matcher):
            return self._ids['"']
        # No letter but those of literals stands between texts.
        is_text = self._allows(matcher, "a") or self._allows(matcher, "x")
        chars = _FILLING if is_text else _CLOSING
        return next((self._ids[char] for char in chars if self._allows(matcher, char)), None)

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

    def _least_used(self, matcher: LLMatcher, used: Counter[str]) -> int | None:
        """A character that may come next, or else a token: one may lead round and round."""
        allowed = self._allowed(matcher)
        single = np.intersect1d(allowed, self._single).tolist()
        if not single:
            return int(allowed[0]) if len(allowed) else None

        def cost(token: int) -> int:
            char = self._tokens[token].decode()
            rest = len(_LEADING_ON) + char.isalpha() + 2 * char.isdigit() + 3 * char.isspace()
            known = _LEADING_ON.find(char)
            often = len(_LEADING_ON) * used[_kind(char)] + used[char]
            return often + (rest if known < 0 else known)

        found = min(single, key=cost)
        char = self._tokens[found].decode()
        used.update({char, _kind(char)})
        return found

    def _allowed(self, matcher: LLMatcher) -> np.ndarray:
        mask = np.zeros((1, -(-len(self._tokens) // 32)), np.int32)
        fill_next_token_bitmask(matcher, mask, 0)
        return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]


def _is_whole(token: bytes) -> bool:
    """Whether it is characters, and no part of one."""
    try:
        return bool(token.decode())
    except UnicodeDecodeError:
        return False


def _kind(char: str) -> str:
    """Letters are alike, and digits."""
    if char in _LEADING_ON:
        return char
    return "letter" if char.isalpha() else "digit" if char.isdigit() else char


class Ending:
    """Watches how many tokens one output has left, and ends it in time.

    That is at the last moment: what the model would say may end by itself until then. Of tokens
    that may come next those are left behind which the end is within reach; within a text, where
    they are many, those that begin too much behind it are left out, and it is closed when no more
    than its end fits. How much further from its end a single token has brought the output lately
    says when to look for such tokens.

    It is left alone, to be cut off, where its end would take more than half of all its tokens:
    what the model says first is worth more than what nobody said.

    Args:
        room: most tokens of the output.

    Attributes:
        is_due: its end is all that comes.
        is_cut_short: the model had no say in some of it.
        only: the tokens that may come next; None where they are not so few.
        banned: tokens that may not.
    """

    def __init__(self, finder: EndFinder, room: int):
        self._finder, self._left, self._most = finder, room, room // 2
        self._length: int | None = None
        self._look_at, self._jump = _FIRST_LOOK, 0
        self._is_known = self.is_due = self.is_cut_short = False
        self.only: list[int] | None = None
        self.banned: list[int] = []

    def accept(self, token_id: int) -> None:
        """Goes on by a token."""
        self._left, self.only, self.banned = self._left - 1, None, []
        # In the middle of a text or a number an end stays what it is.
        self._is_known &= self._finder.is_plain(token_id)

    def look(self, matcher: LLMatcher) -> list[int]:
        """The tokens of the end, if it is time; the output is complete behind them."""
        if self._left > self._look_at or (self._is_known and not self._is_near):
            return []
        way, before = self._finder.shortest(matcher, min(self._left, self._most)), self._length
        self._length, self._is_known = None if way is None else len(way), True
        # What is too far may come nearer, and what is near get further: but not at once.
        far = self._left // 3 if way is None else self._left // 2
        self._look_at = max(far, len(way) + _WATCHED if way is not None else 0)
        if way is not None and before is not None:
            self._jump = max(self._jump, len(way) - before)
        return self._narrowed(matcher, way) if way is not None and self._is_near else []

    def _narrowed(self, matcher: LLMatcher, way: list[int]) -> list[int]:
        finder, most = self._finder, self._left - 1
        num_allowed, fits = finder.that_fit(matcher, most) if len(way) <= _SHORT else (0, [])
        if fits or num_allowed == 1 or not way:
            self.only = fits or None
            self.is_cut_short |= len(fits) == 1 < num_allowed
            return []
        spare = self._left - len(way)
        if spare > _SPARE:
            self.banned = finder.that_take_more(spare)
            if spare <= self._jump + 1 and len(way) <= _SHORT:
                self.banned += finder.that_go_too_far(matcher, most)
            return []
        self.is_due = self.is_cut_short = True
        return way

    @property
    def _is_near(self) -> bool:
        near = max(_REST_OF_ESCAPE, self._jump + 1)
        return self._length is not None and self._left <= self._length + near
