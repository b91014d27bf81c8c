"""Prompts -> token ids that fit the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmjax.beam_search import BeamSearchParams
from llmjax.errors import InvalidRequestError
from llmjax.request import SamplingParams, longest

from .schema.chat import ChatPrompt

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | list[int], add_special_tokens: bool
) -> list[int]:
    """Token ids of a completion prompt."""
    return tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt


def encode_chat(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    """Token ids of chat messages.

    Raises:
        InvalidRequestError: the chat template refuses them, or there is no template.
    """
    kwargs = dict(prompt.template_kwargs)
    if prompt.tools:
        kwargs["tools"] = [tool.as_dict() for tool in prompt.tools]
    if prompt.reasoning_effort is not None:
        kwargs = {**effort(prompt.reasoning_effort, tokenizer.tool_template or ""), **kwargs}
    return tokenizer.encode_chat(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        **kwargs,
    )


def effort(asked: str, template: str) -> dict[str, Any]:
    """How a chat template is told of a `reasoning_effort`.

    Raises:
        InvalidRequestError: it knows of none.
    """
    if "reasoning_effort" in template:
        return {"reasoning_effort": asked}
    if asked == "none":
        return {"enable_thinking": False} if "enable_thinking" in template else {}
    raise InvalidRequestError(
        f"reasoning_effort is {asked!r}, allowed: none, as the model's chat template knows of no "
        "efforts",
        param="reasoning_effort",
    )


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
        InvalidRequestError: the prompt is empty, or what is asked for is too long.
    """
    room = longest(prompt_len, params.max_tokens, max_model_len, param=param) - prompt_len
    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=min(default_max_tokens or room, room))


def fit_beam(beam: BeamSearchParams | None, params: SamplingParams) -> BeamSearchParams | None:
    """A beam search of as many tokens as the fitted `params` allow."""
    return None if beam is None else replace(beam, max_tokens=params.max_tokens or 1)
