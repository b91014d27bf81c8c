"""What each token adds to a text, as bytes: the `tokenizers` decoders, one token at a time.

`tokenizers` decodes whole lists, and its byte fallback turns a run of bytes with one bad
byte into replacement characters throughout, good characters included. Serving needs the
text of a growing list, and what has been shown cannot be taken back; so a token is spelled
here as the bytes it stands for, and bytes become text in `detokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

from ..errors import InvalidRequestError, UnsupportedModelError

Step = Callable[[str, bool], str | bytes]
"""(token text, is it the first token of the text) -> text for the next step, or final bytes."""


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The order matters: it is that of the peer's own list.
_WORDPIECE_CLEANUP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _byte_level(spec: dict) -> Step:
    def step(text: str, first: bool) -> bytes:
        try:
            return bytes([BYTE_ALPHABET[char] for char in text])
        except KeyError:
            return text.encode()

    return step


def _byte_fallback(spec: dict) -> Step:
    def step(text: str, first: bool) -> str | bytes:
        match = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(match[1], 16)]) if match else text

    return step


def _replace(spec: dict) -> Step:
    pattern, content = spec["pattern"], spec["content"]
    if "String" not in pattern:
        raise UnsupportedModelError(f"the tokenizer's decoder replaces by {pattern}, not a string")
    return lambda text, first: text.replace(pattern["String"], content)


def _metaspace(spec: dict) -> Step:
    space, hides_first = spec["replacement"], spec["prepend_scheme"] != "never"
    return lambda text, first: text.replace(space, "" if first and hides_first else " ")


def _wordpiece(spec: dict) -> Step:
    prefix, cleanup = spec["prefix"], spec["cleanup"]

    def step(text: str, first: bool) -> str:
        if not first:
            text = text.removeprefix(prefix) if text.startswith(prefix) else " " + text
        for old, new in _WORDPIECE_CLEANUP if cleanup else ():
            text = text.replace(old, new)
        return text

    return step


_STEPS: dict[str, Callable[[dict], Step]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _wordpiece,
}


def _flatten(spec: dict) -> Iterator[dict]:
    if spec["type"] == "Sequence":
        for inner in spec["decoders"]:
            yield from _flatten(inner)
    else:
        yield spec


class Pieces:
    """The bytes of each token of a `tokenizers` backend.

    Attributes:
        strip: at most so many spaces are dropped from the start of a text.

    Raises:
        UnsupportedModelError: the backend's decoder cannot be taken one token at a time.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._added = backend.get_added_tokens_decoder().keys()
        self._memo: dict[tuple[int, bool], bytes] = {}
        self._steps: list[Step] = []
        self.strip = 0
        specs = [] if backend.decoder is None else [*_flatten(_state(backend.decoder))]
        if backend.decoder is None:
            self._steps.append(lambda text, first: text if first else " " + text)
        fused = False
        for spec in specs:
            kind = spec["type"]
            if kind == "Fuse":
                fused = True
            elif not fused and kind in _STEPS:
                self._steps.append(_STEPS[kind](spec))
            elif fused and kind == "Strip" and spec["content"] == " " and not spec["stop"]:
                self.strip += spec["start"]
            else:
                raise UnsupportedModelError(
                    f"the tokenizer's decoder has a step {spec}{' after Fuse' * fused}; "
                    f"supported: {', '.join(_STEPS)}, then Fuse, then Strip of leading spaces"
                )
        self._byte_level = any(spec["type"] == "ByteLevel" for spec in specs)

    def __call__(self, token_id: int, first: bool = False) -> bytes | None:
        """Bytes of the token, at the start of a text or later; None where there is no such token.

        Raises:
            InvalidRequestError: an id that no vocabulary could hold.
        """
        piece = self._memo.get((token_id, first))
        if piece is None:
            if not 0 <= token_id < 2**32:
                raise InvalidRequestError(f"token id {token_id}, allowed: 0 to {2**32 - 1}")
            text = self._backend.id_to_token(token_id)
            if text is None:
                return None
            piece = self._memo[token_id, first] = self._spell(token_id, text, first)
        return piece

    def _spell(self, token_id: int, text: str | bytes, first: bool) -> bytes:
        # An added token is written plainly, not in the alphabet of bytes.
        steps = () if self._byte_level and token_id in self._added else self._steps
        for step in steps:
            if isinstance(text, str):
                text = step(text, first)
        return text if isinstance(text, bytes) else text.encode()


def _state(part: Any) -> dict:
    return json.loads(part.__getstate__())
