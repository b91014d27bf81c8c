"""Prompts -> token ids that fit the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmjax.errors import InvalidRequestError
from llmjax.request import SamplingParams

from .schema.chat import ChatPrompt

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | list[int], add_special_tokens: bool
) -> list[int]:
    """Token ids of a completion prompt.

    Raises:
        InvalidRequestError: it is empty and the tokenizer adds no BOS.
    """
    ids = tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
    if not ids:
        raise InvalidRequestError("empty prompt: it has no tokens", param="prompt")
    return ids


def encode_chat(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    """Token ids of chat messages.

    Raises:
        InvalidRequestError: the chat template refuses them, or there is no template.
    """
    ids = tokenizer.encode_chat(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        **prompt.template_kwargs,
    )
    if not ids:
        raise InvalidRequestError("empty prompt: it has no tokens", param="messages")
    return ids


def fit(
    params: SamplingParams,
    prompt_len: int,
    max_model_len: int,
    *,
    default_max_tokens: int | None,
    param: str,
) -> SamplingParams:
    """`params` with max_tokens set, proved to fit the context together with the prompt.

    Raises:
        InvalidRequestError: the prompt, or what is asked for on top, is too long.
    """
    room = max_model_len - prompt_len
    asked = params.max_tokens or 1
    if asked > room:
        raise InvalidRequestError(
            f"the model's context is {max_model_len} tokens, but {prompt_len + asked} were asked "
            f"for: {prompt_len} in the prompt and {'' if params.max_tokens else 'at least '}"
            f"{asked} to generate",
            param=param if room < 1 or params.max_tokens is None else "max_tokens",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=min(default_max_tokens or room, room))
