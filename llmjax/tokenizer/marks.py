"""Special tokens that somebody writes in a message stay text.

A conversation is one text when it is tokenised, in which the chat template's own special tokens are
to be seen, and those in what people say are not: else whoever writes a message could end it, and go
on as the system. Each of the latter gets a mark behind its first character, which the template
hands on as it does any text. The mark is a token of a tokenizer for such texts alone; the others
are what they would have been, and it is left out.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any

import tokenizers

from ..errors import InvalidRequestError

_MARK_SIZE = 24
"""Digits: no filter of a template changes them, and nobody guesses so many."""


class Marks:
    """Of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._mark = "".join(secrets.choice(string.digits) for _ in range(_MARK_SIZE))
        added = backend.get_added_tokens_decoder().values()
        texts = [t.content for t in added if t.special and len(t.content) > 1]
        self._special = re.compile(_any_of(texts)) if texts else None

    def put(self, value: Any) -> Any:
        """`value` where no text in it has a special token; else one like it, with marks.

        Args:
            value: what JSON has, such as messages.

        Raises:
            InvalidRequestError: it is nested too deeply.
        """
        if not self._is_in(value):
            return value
        try:
            return self._marked(value)
        except RecursionError:
            message = "messages: they are nested too deeply"
            raise InvalidRequestError(message, param="messages") from None

    def remove(self, text: str) -> str:
        return text.replace(self._mark, "")

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text with marks, without special ones; None where it has no mark."""
        if self._mark not in text:
            return None
        ids = self._knowing.encode(text, add_special_tokens=False).ids
        mark = self._knowing.token_to_id(self._mark)
        return [i for i in ids if i != mark]

    @cached_property
    def _knowing(self) -> tokenizers.Tokenizer:
        """The tokenizer with the mark for a token; both have one model."""
        whole, copy = self._backend, tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(whole, part) is not None:
                setattr(copy, part, getattr(whole, part))
        added = whole.get_added_tokens_decoder()
        in_order = (added[i] for i in sorted(added))
        for special, tokens in groupby(in_order, lambda token: token.special):
            (copy.add_special_tokens if special else copy.add_tokens)(list(tokens))
        copy.add_special_tokens([tokenizers.AddedToken(self._mark, normalized=False)])
        return copy

    def _is_in(self, value: Any) -> bool:
        """Whether there is a special token in any text, however deep."""
        if self._special is None:
            return False
        rest = [value]
        while rest:
            one = rest.pop()
            if isinstance(one, str):
                if self._special.search(one):
                    return True
            elif isinstance(one, Mapping):
                rest += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                rest += one
        return False

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            kind = type(value) if isinstance(value, dict) else dict
            return kind((self._marked(k), self._marked(v)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return [self._marked(one) for one in value]
        return value

    def _marked_text(self, text: str) -> str:
        assert self._special is not None
        while self._special.search(text):  # again, as they may overlap
            text = self._special.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)
        return text


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression of them that looks at each character once, however many they are."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _of_tree(tree)


def _of_tree(tree: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _of_tree(rest) for char, rest in tree.items() if char]
    if len(branches) == 1 and "" not in tree:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}" if branches else ""
