"""The bodies of /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .chat import PROMPT, PROMPT_NO_OPS, ChatPrompt, chat_prompt
from .fields import Field, Parse, array, boolean, described, only, read, text
from .sampling import Limits, token_ids


@described({"type": "array", "items": {"type": "integer", "minimum": 0}})
def ids(value: Any, path: str) -> list[Any]:
    """Token ids; which ones there are depends on the model, and is checked with that."""
    return array(value, path)


TOKENIZE_TEXT: dict[str, Field] = {
    "model": Field(text),
    "prompt": Field(text, required=True),
    "add_special_tokens": Field(boolean, True),
    "return_token_strs": Field(boolean, False),
}

TOKENIZE_CHAT: dict[str, Field] = {
    **PROMPT,
    "model": Field(text),
    "return_token_strs": Field(boolean, False),
}

_OF_CHATS: dict[str, Parse] = {
    name: only() for name in (*TOKENIZE_CHAT, *PROMPT_NO_OPS) if name not in TOKENIZE_TEXT
}
"""Null where there is a text."""

DETOKENIZE: dict[str, Field] = {
    "model": Field(text),
    "tokens": Field(ids, required=True),
}


@dataclass(frozen=True)
class TokenizeRequest:
    model: str | None
    prompt: str | ChatPrompt
    add_special_tokens: bool
    return_token_strs: bool

    @property
    def may_be_slow(self) -> bool:
        """A template may take long."""
        return isinstance(self.prompt, ChatPrompt) and self.prompt.template is not None


@dataclass(frozen=True)
class DetokenizeRequest:
    model: str | None
    tokens: list[int]


def parse_tokenize(body: dict[str, Any], limits: Limits) -> TokenizeRequest:
    """Reads a prompt or chat messages. Raises InvalidRequestError."""
    if body.get("messages") is not None:
        values = read(body, TOKENIZE_CHAT, PROMPT_NO_OPS | {"prompt": only()})
        prompt: str | ChatPrompt = chat_prompt(values, limits)
        special = False
    else:
        values = read(body, TOKENIZE_TEXT, _OF_CHATS)
        prompt, special = values["prompt"], values["add_special_tokens"]
    return TokenizeRequest(values["model"], prompt, special, values["return_token_strs"])


def parse_detokenize(body: dict[str, Any], limits: Limits) -> DetokenizeRequest:
    """Reads token ids of the model. Raises InvalidRequestError."""
    values = read(body, DETOKENIZE, {})
    return DetokenizeRequest(values["model"], token_ids(values["tokens"], limits, "tokens"))
