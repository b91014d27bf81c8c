"""Log-probabilities in the three shapes that clients know."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmjax.output import Logprob

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's value."""

Entry = Mapping[int, Logprob]


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def spelled(tokenizer: Tokenizer, token: int, tokens_as_ids: bool) -> str:
    """A token for the client: its text, which others may share, or its id."""
    return f"token_id:{token}" if tokens_as_ids else tokenizer.token_text(token)


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[Entry],
    num_top: int,
    *,
    tokens_as_ids: bool = False,
) -> dict[str, Any]:
    """The `logprobs` of a chat choice, with the exact bytes of every token."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelled(tokenizer, token, tokens_as_ids),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        top = sorted(entry.items(), key=lambda pair: -pair[1].logprob)[:num_top]
        content.append(
            {
                **item(token, entry[token].logprob),
                "top_logprobs": [item(other, value.logprob) for other, value in top],
            }
        )
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[Any]:
    """vLLM's `prompt_logprobs`: null for the first token, then {token id: ...}."""
    return [
        entry and {str(t): {**v._asdict(), "logprob": finite(v.logprob)} for t, v in entry.items()}
        for entry in entries
    ]


class CompletionLogprobs:
    """The `logprobs` of one choice of /v1/completions, delta by delta.

    `text_offset` counts characters of the choice's text before each token; bytes of a
    character that is not whole yet count once it is.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, tokens_as_ids: bool = False
    ):
        self._tokenizer, self._tokens_as_ids = tokenizer, tokens_as_ids
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, text: str, token_ids: Sequence[int], entries: Sequence[Entry | None]
    ) -> dict[str, Any]:
        """The part of an echoed prompt, whose `text` the client may have written itself."""

        def width(token: int) -> int:
            piece = self._decode(token)
            # A BOS or a leading space that the tokenizer added is not in the text.
            for candidate in (piece, piece.removeprefix(" ")):
                if text.startswith(candidate, self._offset):
                    return len(candidate)
            return 0

        part = self._part(token_ids, entries, width)
        self._offset = len(text)
        self._decoder.reset()
        return part

    def output(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> dict[str, Any]:
        """The part of newly generated tokens."""
        special = self._tokenizer.special_ids if self._skip_special_tokens else ()

        def width(token: int) -> int:
            return 0 if token in special else len(self._decode(token))

        return self._part(token_ids, entries, width)

    def _decode(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def _part(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entry | None],
        width: Callable[[int], int],
    ) -> dict[str, Any]:
        text_offset = []
        for token in token_ids:
            text_offset.append(self._offset)
            self._offset += width(token)
        return {
            "tokens": [self._spelled(token) for token in token_ids],
            "token_logprobs": [
                entry and finite(entry[token].logprob)
                for token, entry in zip(token_ids, entries, strict=True)
            ],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": text_offset,
        }

    def _top(self, entry: Entry) -> dict[str, float]:
        """By text, as the API has it; of tokens with the same text the likeliest stays."""
        top: dict[str, float] = {}
        for token, value in sorted(entry.items(), key=lambda pair: -pair[1].logprob):
            top.setdefault(self._spelled(token), finite(value.logprob))
        return top

    def _spelled(self, token: int) -> str:
        return spelled(self._tokenizer, token, self._tokens_as_ids)
