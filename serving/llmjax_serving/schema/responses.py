"""The body of /v1/responses, as that of a chat completion that asks for the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmjax.errors import InvalidRequestError
from llmjax.request import MAX_TOKENS

from . import structured
from .chat import ChatRequest, parse_chat
from .fields import (
    Field,
    Parse,
    array,
    boolean,
    bounded,
    described,
    integer,
    list_of,
    mapping,
    object_schema,
    only,
    read,
    refuse,
    renamed,
    text,
)
from .response_items import Item, items, messages
from .sampling import OPTIONS, SAMPLING, Limits
from .tools import BUDGET, reasoning_effort

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
OF_OTHER_TOOLS = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)
"""What `include` may name that no answer here has."""
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512


@described({"type": "array", "items": {"enum": [LOGPROBS, *OF_OTHER_TOOLS]}})
def include(value: Any, path: str) -> list[str]:
    for i, name in enumerate(array(value, path)):
        if name == ENCRYPTED:
            raise refuse(f"{path}[{i}]", name, "none: reasoning items have their text in content")
        if name != LOGPROBS and name not in OF_OTHER_TOOLS:
            raise refuse(f"{path}[{i}]", name, ", ".join((LOGPROBS, *OF_OTHER_TOOLS)))
    return value


@described({"type": "object", "additionalProperties": {"type": "string"}})
def metadata(value: Any, path: str) -> dict[str, str]:
    if len(mapping(value, path)) > MOST_METADATA:
        raise refuse(path, value, f"up to {MOST_METADATA} keys")
    for key, label in value.items():
        if len(key) > LONGEST_KEY:
            raise refuse(path, key, f"keys of up to {LONGEST_KEY} characters")
        if len(text(label, f"{path}.{key}")) > LONGEST_VALUE:
            raise refuse(f"{path}.{key}", label, f"up to {LONGEST_VALUE} characters")
    return value


_FUNCTION: dict[str, Field] = {
    "name": Field(text, required=True),
    "description": Field(text),
    "parameters": Field(mapping),
    "strict": Field(boolean, False),
}
_FUNCTION_NO_OPS: dict[str, Parse] = {
    "type": only("function"),
    "allowed_callers": only(["direct"]),
    "defer_loading": only(False),
    "output_schema": only(),
}


@described(object_schema(_FUNCTION, _FUNCTION_NO_OPS))
def function(value: Any, path: str) -> dict[str, Any]:
    kind = mapping(value, path).get("type")
    if kind != "function":
        raise refuse(f"{path}.type", kind, '"function": this server runs no tools of its own')
    return {"type": "function"} | read(value, _FUNCTION, _FUNCTION_NO_OPS, f"{path}.")


CHOICES = (
    '"none", "auto", "required", {"type": "function", "name"} or {"type": "allowed_tools", ...}'
)
_NAMED = {"type": Field(only("function"), required=True), "name": Field(text, required=True)}


def _named(value: Any, path: str) -> str:
    return read(mapping(value, path), _NAMED, {}, f"{path}.")["name"]


_ALLOWED: dict[str, Field] = {
    "mode": Field(text, required=True),
    "tools": Field(list_of(_named), required=True),
}


@described({"type": ["string", "object"]})
def tool_choice(value: Any, path: str) -> ToolChoice:
    """What there is to choose from depends on the tools, and is checked with them."""
    if isinstance(value, str):
        return ToolChoice(value, value)
    kind = mapping(value, path).get("type")
    if kind == "function":
        return ToolChoice(value, _function(_named(value, path)))
    if kind != "allowed_tools":
        raise refuse(f"{path}.type", kind, CHOICES)
    allowed = read(value, _ALLOWED, {"type": text}, f"{path}.")
    if allowed["mode"] not in ("auto", "required"):
        raise refuse(f"{path}.mode", allowed["mode"], "auto, required")
    if not allowed["tools"]:
        raise refuse(f"{path}.tools", [], "at least one function")
    tools = [_function(name) for name in allowed["tools"]]
    inner = {"mode": allowed["mode"], "tools": tools}
    return ToolChoice(value, {"type": "allowed_tools", "allowed_tools": inner})


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@dataclass(frozen=True)
class ToolChoice:
    """Attributes:
    asked, chat: as this API and as chat completions have it.
    """

    asked: Any
    chat: Any


_REASONING: dict[str, Field] = {"effort": Field(reasoning_effort)}
# "auto" is the best summary that there is: none.
_REASONING_NO_OPS: dict[str, Parse] = {
    "context": only("auto"),
    "generate_summary": only("auto"),
    "mode": only("standard"),
    "summary": only("auto"),
}


@described(object_schema(_REASONING, _REASONING_NO_OPS))
def reasoning(value: Any, path: str) -> str | None:
    """How long to think."""
    return read(mapping(value, path), _REASONING, _REASONING_NO_OPS, f"{path}.")["effort"]


_JSON_SCHEMA: dict[str, Field] = {
    "type": Field(text, required=True),
    "name": Field(text, required=True),
    "schema": Field(mapping, required=True),
    "description": Field(text),
    # A grammar is always kept to.
    "strict": Field(boolean, True),
}


def text_format(value: Any, path: str) -> dict[str, Any]:
    kind = mapping(value, path).get("type")
    if kind in ("text", "json_object"):
        return read(value, {"type": Field(text, required=True)}, {}, f"{path}.")
    if kind != "json_schema":
        raise refuse(f"{path}.type", kind, "text, json_object, json_schema")
    given = read(value, _JSON_SCHEMA, {}, f"{path}.")
    return {name: value for name, value in given.items() if value is not None}


_TEXT: dict[str, Field] = {"format": Field(text_format, {"type": "text"})}
_TEXT_NO_OPS: dict[str, Parse] = {"verbosity": only("medium")}


@described(object_schema(_TEXT, _TEXT_NO_OPS))
def text_options(value: Any, path: str) -> dict[str, Any]:
    return read(mapping(value, path), _TEXT, _TEXT_NO_OPS, f"{path}.")["format"]


@described({"enum": ["auto", "disabled"]})
def truncation(value: Any, path: str) -> str:
    if value not in ("auto", "disabled"):
        raise refuse(path, value, "auto, disabled")
    return value


NOT_HERE = {"n", "prompt_logprobs"}
"""Fields of chat completions that this API has no place for in its answers."""

CHAT_FIELDS: dict[str, Field] = {
    **OPTIONS,
    **{name: field for name, field in SAMPLING.items() if name not in NOT_HERE},
    **BUDGET,
    "structured_outputs": structured.FIELDS["structured_outputs"],
    "chat_template_kwargs": Field(mapping),
    "model": Field(text),
    "parallel_tool_calls": Field(boolean, True),
    "split_special_tokens": Field(boolean, True),
    "top_logprobs": Field(integer(0), 0),
}
"""Fields that are read as those of chat completions with the same name."""

ECHOED: dict[str, Field] = {
    "instructions": Field(text),
    "max_output_tokens": Field(integer(1, MAX_TOKENS)),
    "max_tool_calls": Field(integer(1)),
    "metadata": Field(metadata, {}),
    "previous_response_id": Field(text),
    "prompt_cache_key": Field(bounded(text, minLength=1)),
    "safety_identifier": Field(text),
    "truncation": Field(truncation, "disabled"),
}
"""Fields that an answer repeats as they are.

Built-in tools, whose calls `max_tool_calls` counts, are none here; everything is cached, whatever
the `prompt_cache_key`.
"""

FIELDS: dict[str, Field] = {
    **CHAT_FIELDS,
    **ECHOED,
    "include": Field(include, []),
    "input": Field(items, required=True),
    "reasoning": Field(reasoning),
    "store": Field(boolean),
    "stream": Field(boolean, False),
    "text": Field(text_options, {"type": "text"}),
    "tool_choice": Field(tool_choice),
    "tools": Field(list_of(function), []),
}

NO_OPS: dict[str, Parse] = {
    "background": only(False),
    "context_management": only(),
    "conversation": only(),
    "moderation": only(),
    "prompt": only(),
    "prompt_cache_options": only(),
    "prompt_cache_retention": only("in_memory"),
    "service_tier": only("auto", "default"),
    "stream_options": only({}, {"include_obfuscation": False}),
}


@dataclass(frozen=True)
class ResponseRequest:
    """Attributes:
    items: what is new in the conversation.
    previous: the response that it goes on from.
    store: None where the client said nothing.
    truncate: the conversation's first turns may be left out.
    instructions: the system message, of this request only.
    echo: what the answer repeats.
    chat: the body of a chat completion, all but the messages.
    """

    items: list[Item]
    previous: str | None
    store: bool | None
    stream: bool
    truncate: bool
    instructions: str | None
    echo: dict[str, Any]
    chat: dict[str, Any]


def parse_response(body: dict[str, Any]) -> ResponseRequest:
    """Reads the JSON body of /v1/responses; what depends on the model `chat_request` checks.

    Raises:
        InvalidRequestError: names the field at fault.
    """
    values = read(body, FIELDS, NO_OPS)
    wants_logprobs = LOGPROBS in values["include"]
    if values["top_logprobs"] and not wants_logprobs:
        message = f"top_logprobs is allowed only where include has {LOGPROBS}"
        raise InvalidRequestError(message, param="top_logprobs")
    choice = values["tool_choice"] or ToolChoice("auto", None)
    if wants_logprobs and values["tools"] and choice.chat != "none":
        # Which tokens are text and which a call is not known to the token.
        raise refuse("include", values["include"], f"{LOGPROBS} only without tools")
    # As they came: they are read again, by the table of chat completions.
    chat = {name: body[name] for name in CHAT_FIELDS if body.get(name) is not None}
    chat.pop("top_logprobs", None)
    optional = {
        "top_logprobs": values["top_logprobs"] if wants_logprobs else None,
        "max_completion_tokens": values["max_output_tokens"],
        "reasoning_effort": values["reasoning"],
        "tool_choice": choice.chat,
        "tools": [_chat_tool(tool) for tool in values["tools"]] or None,
    }
    chat |= {name: value for name, value in optional.items() if value is not None}
    chat |= {"logprobs": wants_logprobs, "response_format": _chat_format(values["text"])}
    return ResponseRequest(
        items=values["input"],
        previous=values["previous_response_id"],
        store=values["store"],
        stream=values["stream"],
        truncate=values["truncation"] == "auto",
        instructions=values["instructions"],
        echo=_echo(values, choice),
        chat=chat,
    )


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    given = {name: tool[name] for name in _FUNCTION if tool[name] is not None}
    return {"type": "function", "function": given}


def _chat_format(given: dict[str, Any]) -> dict[str, Any]:
    if given["type"] != "json_schema":
        return given
    schema = {name: given[name] for name in ("name", "schema")}
    return {"type": "json_schema", "json_schema": schema}


def _echo(values: dict[str, Any], choice: ToolChoice) -> dict[str, Any]:
    user = values["user"]
    return {
        **{name: values[name] for name in ECHOED},
        **({} if user is None else {"user": user}),
        "background": False,
        "parallel_tool_calls": values["parallel_tool_calls"],
        "reasoning": {"effort": values["reasoning"], "summary": None},
        "service_tier": "default",
        "text": {"format": values["text"], "verbosity": "medium"},
        "tool_choice": choice.asked,
        "tools": values["tools"],
        "top_logprobs": values["top_logprobs"],
    }


def chat_request(
    request: ResponseRequest, conversation: Iterable[Item], limits: Limits
) -> ChatRequest:
    """The chat completion that answers `conversation` as `request` asks.

    Raises:
        InvalidRequestError: names the field at fault.
    """
    told = messages(conversation, request.instructions)
    with naming_fields():
        return parse_chat(request.chat | {"messages": told}, limits)


_OTHER_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\btool_choice\.allowed_tools\b"), "tool_choice"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
)


@contextmanager
def naming_fields() -> Iterator[None]:
    """Refusals of what chat completions share name the fields of this API."""
    try:
        yield
    except InvalidRequestError as error:
        names, param = _OTHER_NAMES, error.param
        if param is not None and param.startswith("messages"):
            names = ((re.compile(re.escape(param)), "input"), *names)
        raise renamed(error, names) from error
