"""Prompts -> token ids that fit the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmjax.beam_search import BeamSearchParams
from llmjax.errors import InvalidRequestError
from llmjax.request import SamplingParams, longest
from llmjax.tokenizer import template_variables

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
    return tokenizer.encode_chat(prompt.messages, **template_arguments(tokenizer, prompt))


def template_arguments(tokenizer: Tokenizer, prompt: ChatPrompt) -> dict[str, Any]:
    """What `Tokenizer.encode_chat` and `render_chat` take beside the messages.

    Raises:
        InvalidRequestError: the chat template knows of no `reasoning_effort`.
    """
    optional = {
        "tools": [tool.as_dict() for tool in prompt.tools] or None,
        "documents": prompt.documents,
        "chat_template": prompt.template,
        "add_special_tokens": prompt.add_special_tokens or None,
        "split_special_tokens": None if prompt.split_special_tokens else False,
    }
    return {
        **thinking(prompt, prompt.template or tokenizer.tool_template or ""),
        **prompt.template_kwargs,
        **{name: value for name, value in optional.items() if value is not None},
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
    }


SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn the reasoning on and off."""


def thinking(prompt: ChatPrompt, template: str) -> dict[str, Any]:
    """How a chat template is told whether the model is to think, and for how long.

    Raises:
        InvalidRequestError: it knows of no efforts.
    """
    effort = prompt.reasoning_effort
    if effort is None and not prompt.thinks:
        return {}
    known = template_variables(template)
    if effort is not None and "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if effort in (None, "none"):
        return {name: effort is None for name in SWITCHES if name in known}
    raise InvalidRequestError(
        f"reasoning_effort is {effort!r}, allowed: none, as the model's chat template knows of no "
        "efforts (thinking_token_budget bounds the reasoning of any model)",
        param="reasoning_effort",
    )


def must_be_cut_short(prompt: ChatPrompt, template: str) -> bool:
    """The model is not to think, and its chat template cannot tell it so."""
    no_thinking = prompt.reasoning_effort == "none"
    return no_thinking and not template_variables(template) & {"reasoning_effort", *SWITCHES}


def truncated(
    token_ids: list[int], most: int | None, params: SamplingParams, max_model_len: int
) -> list[int]:
    """The last tokens of a prompt that the client lets be cut; see `ChatRequest.truncate`."""
    if most is None:
        return token_ids
    if most == -1:
        most = max(1, max_model_len - (params.max_tokens or 1))
    return token_ids[-most:]


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
