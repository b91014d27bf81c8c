"""Text of a growing list of token ids, as soon as it is complete."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .pieces import Pieces

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Token ids in, text out, from the start of a text.

    Bytes that cannot be UTF-8 become U+FFFD at once; bytes that may still become a
    character wait for the next token, three at most.
    """

    def __init__(self, pieces: Pieces, skip: frozenset[int]):
        self.pieces = pieces
        self.skip = skip
        self.decoder = _new_decoder("replace")
        self.first = True
        self.strip = pieces.strip

    def push(self, token_id: int) -> str:
        piece = None if token_id in self.skip else self.pieces(token_id, self.first)
        if piece is None:
            return ""
        self.first = False
        while self.strip and piece:
            if piece[:1] != b" ":
                self.strip = 0
                break
            piece, self.strip = piece[1:], self.strip - 1
        return self.decoder.decode(piece)

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


class IncrementalDetokenizer:
    """What output tokens add to the text of a prompt.

    The parts that `push` and `finish` return join to `decode(prompt + output)` without
    its head, `decode(prompt)`: a leading space is kept unless the prompt has no text, and
    a character begun by the prompt's last token is completed. Work per token is constant.

    Args:
        prompt_ids: the tokens that the output follows.
        skip_special_tokens: leave special tokens out of the text, but those of `kept_ids`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept_ids: Sequence[int] = (),
    ):
        skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        if kept_ids:  # or the set, which may be large, would be copied for each request
            skip = skip.difference(kept_ids)
        self._stream = TextStream(tokenizer.pieces, skip)
        for token_id in prompt_ids:
            if not self._stream.first and not self._stream.strip:
                break
            self._stream.push(token_id)
        self._stream.decoder.reset()
        self._stream.decoder.decode(self._tail(prompt_ids))
        # The prompt's text shows an unfinished character as U+FFFD already.
        self._shown = bool(self._stream.decoder.getstate()[0])

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes: enough to hold any unfinished character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:
                break
            if token_id not in self._stream.skip:
                tail = (self._stream.pieces(token_id) or b"") + tail
        return tail

    def push(self, token_ids: Iterable[int]) -> str:
        """New text that is complete; one token at a time says what each contributed."""
        return self._new("".join(map(self._stream.push, token_ids)))

    def finish(self) -> str:
        """The rest; an unfinished character becomes U+FFFD."""
        return self._new(self._stream.finish())

    def _new(self, text: str) -> str:
        if self._shown and text:
            self._shown = False
            return text.removeprefix("\ufffd")
        return text
