"""The body of /v1/chat/completions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmjax.answers import Tool, ToolUse
from llmjax.beam_search import BeamSearchParams
from llmjax.errors import InvalidRequestError
from llmjax.request import MAX_TOKENS, RequestOptions, SamplingParams

from . import tools
from .fields import (
    Field,
    Parse,
    anything,
    boolean,
    described,
    integer,
    list_of,
    mapping,
    object_schema,
    only,
    read,
    refuse,
    schema_of,
    text,
)
from .sampling import (
    COMMON,
    NO_OPS,
    SAMPLING,
    Limits,
    StreamOptions,
    beam_params,
    check_stream,
    request_options,
    sampling_params,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts that a message's content may have."""


@described({"enum": list(ROLES)})
def role(value: Any, path: str) -> str:
    if value not in ROLES:
        raise refuse(path, value, ", ".join(ROLES))
    # "developer" is OpenAI's later word for "system"; chat templates know the older one.
    return "system" if value == "developer" else value


@described(
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
                    "required": ["type"],
                },
            },
        ]
    }
)
def content(value: Any, path: str) -> str:
    """Text, or a list of text parts, which are joined by newlines as in vLLM."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(path, value, "a string or a list of text parts")
    return "\n".join(text_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def text_part(value: Any, path: str) -> str:
    kind = mapping(value, path).get("type")
    if kind not in TEXT_PARTS:
        raise refuse(f"{path}.type", kind, '"text" (the model reads text only)')
    key = "refusal" if kind == "refusal" else "text"
    part = read(value, {key: Field(text, required=True)}, {"type": text}, f"{path}.")
    return part[key]


@described({"type": "object"})
def tool_call(value: Any, path: str) -> dict[str, Any]:
    """A call the assistant made; its JSON arguments become an object, as templates expect."""
    call = read(
        mapping(value, path),
        {"id": Field(text), "function": Field(mapping, required=True)},
        {"type": only("function"), "index": integer(0)},
        f"{path}.",
    )
    function = read(
        call["function"],
        {"name": Field(text, required=True), "arguments": Field(arguments, {})},
        {"parsed_arguments": anything},
        f"{path}.function.",
    )
    return {"id": call["id"], "type": "function", "function": function}


def arguments(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise refuse(path, value, "a JSON object as text")
    return value


MESSAGE: dict[str, Field] = {
    "role": Field(role, required=True),
    "content": Field(content),
    "name": Field(text),
    "tool_calls": Field(list_of(tool_call)),
    "tool_call_id": Field(text),
    "reasoning_content": Field(text),
    "reasoning": Field(text),
}

MESSAGE_NO_OPS: dict[str, Parse] = {
    "refusal": only(),
    "annotations": only([]),
    "audio": only(),
    "function_call": only(),
    # What OpenAI's client has made of the content, and sends back with it.
    "parsed": anything,
}


@described(object_schema(MESSAGE, MESSAGE_NO_OPS))
def message(value: Any, path: str) -> dict[str, Any]:
    values = read(mapping(value, path), MESSAGE, MESSAGE_NO_OPS, f"{path}.")
    if values["content"] is None:
        if values["role"] != "assistant":
            raise InvalidRequestError(f"{path}.content is required", param=f"{path}.content")
        values["content"] = ""
    return {name: value for name, value in values.items() if value is not None}


@described({"type": "array", "items": schema_of(message), "minItems": 1})
def messages(value: Any, path: str) -> list[dict[str, Any]]:
    if not value:
        raise refuse(path, value, "a list of at least one message")
    return list_of(message)(value, path)


PROMPT: dict[str, Field] = {
    **tools.PROMPT,
    "messages": Field(messages, required=True),
    "add_generation_prompt": Field(boolean, True),
    "continue_final_message": Field(boolean, False),
    "add_special_tokens": Field(boolean, False),
    "chat_template": Field(text),
    "chat_template_kwargs": Field(mapping, {}),
    "documents": Field(list_of(mapping)),
    "split_special_tokens": Field(boolean, True),
}
"""Fields that make the prompt text; /tokenize has them too."""

FIELDS: dict[str, Field] = {
    **COMMON,
    **SAMPLING,
    **PROMPT,
    **tools.FIELDS,
    "max_tokens": Field(integer(1, MAX_TOKENS)),
    "max_completion_tokens": Field(integer(1, MAX_TOKENS)),
    "logprobs": Field(boolean, False),
    "top_logprobs": Field(integer(0)),
    "echo": Field(boolean, False),
}

PROMPT_NO_OPS: dict[str, Parse] = {
    "mm_processor_kwargs": only(),
}

CHAT_NO_OPS: dict[str, Parse] = {
    **NO_OPS,
    **PROMPT_NO_OPS,
    "audio": only(),
    "best_of": only(1),
    "function_call": only("none", "auto"),
    "functions": only([]),
    "modalities": only(["text"]),
    "prediction": only(),
    "verbosity": only("medium"),
    "web_search_options": only(),
}

RESERVED_TEMPLATE_NAMES = frozenset(
    (
        *("self", "messages", "tools", "documents", "chat_template", "add_special_tokens"),
        *("add_generation_prompt", "continue_final_message", "split_special_tokens"),
    )
)
"""Arguments of `Tokenizer.encode_chat` that are no variables of the template."""


@dataclass(frozen=True)
class ChatPrompt:
    """What the chat template is given.

    Attributes:
        add_special_tokens: those that a text begins and ends with are added to the template's.
        template: instead of the model's own.
        reasoning_effort: how long the model is to think; refused where the template knows none.
        thinks: the model is to think, where the template has a switch for that.
        split_special_tokens: those that are written in what the client sends are text.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool = False
    template: str | None = None
    tools: tuple[Tool, ...] = ()
    reasoning_effort: str | None = None
    thinks: bool = False
    split_special_tokens: bool = True


@dataclass(frozen=True)
class ChatRequest:
    """Attributes:
    params: max_tokens is None where the client said nothing (the rest of the context).
    echo: the answer begins with the last message, where that is the assistant's.
    truncate: tokens of the prompt that stay, its last ones; -1 is what the context holds.
    tools: what the model may call, or must.
    """

    model: str | None
    prompt: ChatPrompt
    params: SamplingParams
    options: RequestOptions
    stream: bool
    stream_options: StreamOptions
    echo: bool
    truncate: int | None
    request_id: str | None
    return_token_ids: bool
    tokens_as_ids: bool
    beam: BeamSearchParams | None
    tools: ToolUse | None
    include_reasoning: bool

    @property
    def may_be_slow(self) -> bool:
        """A template may take long, and schemas of functions are compiled elsewhere first."""
        return self.prompt.template is not None or self.tools is not None


def chat_prompt(values: dict[str, Any], limits: Limits) -> ChatPrompt:
    generate, proceed = values["add_generation_prompt"], values["continue_final_message"]
    if generate and proceed:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; "
            "set add_generation_prompt to false",
            param="continue_final_message",
        )
    if proceed and values["messages"][-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs an assistant message at the end of messages",
            param="continue_final_message",
        )
    if values["chat_template"] is not None and not limits.chat_templates:
        raise InvalidRequestError(
            "chat_template is allowed only where the server runs with "
            "--trust-request-chat-template: a template can keep a processor busy for ever",
            param="chat_template",
        )
    taken = RESERVED_TEMPLATE_NAMES.intersection(values["chat_template_kwargs"])
    if taken:
        raise refuse("chat_template_kwargs", sorted(taken), "names other than these")
    return ChatPrompt(
        values["messages"],
        generate,
        proceed,
        values["chat_template_kwargs"],
        values["documents"],
        values["add_special_tokens"],
        values["chat_template"],
        values["tools"],
        values["reasoning_effort"],
        split_special_tokens=values["split_special_tokens"],
    )


def parse_chat(body: dict[str, Any], limits: Limits) -> ChatRequest:
    """Reads the JSON body of /v1/chat/completions.

    Raises:
        InvalidRequestError: names the field at fault.
    """
    values = read(body, FIELDS, CHAT_NO_OPS)
    options = check_stream(values)
    use = tools.tool_use(values)
    values["tools"] = use.offered if use is not None else ()
    top_logprobs, older, newer = (
        values[name] for name in ("top_logprobs", "max_tokens", "max_completion_tokens")
    )
    if top_logprobs is not None and not values["logprobs"]:
        raise InvalidRequestError(
            "top_logprobs is allowed only where logprobs is true", param="top_logprobs"
        )
    if older is not None and newer is not None and older != newer:
        raise refuse("max_tokens", older, f"the value of max_completion_tokens ({newer})")
    params = sampling_params(
        values,
        limits,
        max_tokens=newer if newer is not None else older,
        logprobs=(top_logprobs or 0) if values["logprobs"] else None,
        logprobs_field="top_logprobs",
        thinking_token_budget=values["thinking_token_budget"],
    )
    return ChatRequest(
        model=values["model"],
        prompt=chat_prompt(values, limits),
        params=params,
        options=request_options(values),
        stream=values["stream"],
        stream_options=options,
        echo=values["echo"],
        truncate=values["truncate_prompt_tokens"],
        request_id=values["request_id"],
        return_token_ids=values["return_token_ids"],
        tokens_as_ids=values["return_tokens_as_token_ids"],
        beam=beam_params(values, limits),
        tools=use,
        include_reasoning=values["include_reasoning"],
    )
