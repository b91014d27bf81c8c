"""The bodies of Anthropic's /v1/messages, as those of chat completions that ask for the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llmjax.errors import InvalidRequestError
from llmjax.request import MAX_TOKENS

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
    number,
    object_schema,
    only,
    read,
    refuse,
    renamed,
    text,
)
from .sampling import Limits

Json = dict[str, Any]

_CACHE: dict[str, Parse] = {"type": text, "cache_control": mapping}
"""What is cached here is not for the client to say: all of it is."""


@described({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
def text_blocks(value: Any, path: str) -> str:
    """Text, or a list of text blocks."""
    if isinstance(value, str):
        return value
    blocks = list_of(mapping)(value, path)
    return "\n".join(_text(block, f"{path}[{i}]") for i, block in enumerate(blocks))


def _text(block: Json, path: str) -> str:
    if block.get("type") != "text":
        raise refuse(f"{path}.type", block.get("type"), "text (the model reads text only)")
    no_ops = _CACHE | {"citations": only([])}
    return read(block, {"text": Field(text, required=True)}, no_ops, f"{path}.")["text"]


def _direct(value: Any, path: str) -> None:
    """Who has called: the model itself, not a program of its own."""
    read(mapping(value, path), {"type": Field(only("direct"), required=True)}, {}, f"{path}.")


_TOOL_USE: dict[str, Field] = {
    "id": Field(text, required=True),
    "name": Field(text, required=True),
    "input": Field(mapping, required=True),
}
_CALLED: dict[str, Parse] = {"caller": _direct, "toolset_name": only()}
"""What Anthropic's client says of a call when it sends it back."""
_TOOL_RESULT: dict[str, Field] = {
    "tool_use_id": Field(text, required=True),
    "content": Field(text_blocks, ""),
}
_RESULT_NO_OPS: dict[str, Parse] = {"is_error": boolean, "toolset_name": only()}
_THINKING: dict[str, Field] = {"thinking": Field(text, required=True)}


def _assistant(blocks: list[Json], path: str) -> list[Json]:
    said: Json = {"role": "assistant", "content": []}
    calls, thoughts = [], []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        match block.get("type"):
            case "text":
                said["content"].append({"type": "text", "text": _text(block, where)})
            case "tool_use":
                call = read(block, _TOOL_USE, _CACHE | _CALLED, f"{where}.")
                function = {"name": call["name"], "arguments": json.dumps(call["input"])}
                calls.append({"id": call["id"], "type": "function", "function": function})
            case "thinking":
                known = _CACHE | {"signature": text}
                thoughts.append(read(block, _THINKING, known, f"{where}.")["thinking"])
            case kind:
                raise refuse(f"{where}.type", kind, "text, tool_use or thinking")
    thought = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [said | thought | ({"tool_calls": calls} if calls else {})]


def _user(blocks: list[Json], path: str) -> list[Json]:
    """Results of tools are messages of their own, before what else is said."""
    results, parts = [], []
    for i, block in enumerate(blocks):
        where = f"{path}[{i}]"
        if block.get("type") == "tool_result":
            result = read(block, _TOOL_RESULT, _CACHE | _RESULT_NO_OPS, f"{where}.")
            told = ("Error: " if block.get("is_error") else "") + result["content"]
            id = result["tool_use_id"]
            results.append({"role": "tool", "tool_call_id": id, "content": told})
        elif block.get("type") == "text":
            parts.append({"type": "text", "text": _text(block, where)})
        else:
            allowed = "text or tool_result (the model reads text only)"
            raise refuse(f"{where}.type", block.get("type"), allowed)
    return results + ([{"role": "user", "content": parts}] if parts else [])


def _message(value: Any, path: str) -> list[Json]:
    fields = {"role": Field(text, required=True), "content": Field(_content, required=True)}
    said = read(mapping(value, path), fields, {}, f"{path}.")
    if said["role"] not in ("user", "assistant"):
        raise refuse(f"{path}.role", said["role"], "user or assistant")
    if isinstance(said["content"], str):
        return [said]
    parse = _assistant if said["role"] == "assistant" else _user
    return parse(said["content"], f"{path}.content")


def _content(value: Any, path: str) -> str | list[Json]:
    return value if isinstance(value, str) else list_of(mapping)(value, path)


@described(
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "assistant"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array"}]},
            },
            "required": ["role", "content"],
        },
    }
)
def messages(value: Any, path: str) -> list[Json]:
    if not array(value, path):
        raise refuse(path, value, "a list of at least one message")
    said = [one for i, item in enumerate(value) for one in _message(item, f"{path}[{i}]")]
    if not said:
        raise refuse(path, value, "a list with something in it")
    return said


_TOOL: dict[str, Field] = {
    "name": Field(text, required=True),
    "description": Field(text),
    "input_schema": Field(mapping, required=True),
    "strict": Field(boolean),
}
_TOOL_NO_OPS: dict[str, Parse] = {
    "type": only("custom"),
    "allowed_callers": only(["direct"]),
    "defer_loading": only(False),
    # Arguments always come as they are written.
    "eager_input_streaming": boolean,
}


@described({"type": "object", "required": ["name", "input_schema"]})
def tool(value: Any, path: str) -> Json:
    kind = mapping(value, path).get("type")
    if kind not in (None, "custom"):
        raise refuse(f"{path}.type", kind, "custom: this server runs no tools of its own")
    given = read(value, _TOOL, _CACHE | _TOOL_NO_OPS, f"{path}.")
    function = {"name": given["name"], "parameters": given["input_schema"]}
    for name in ("description", "strict"):
        if given[name] is not None:
            function[name] = given[name]
    return {"type": "function", "function": function}


_CHOICE: dict[str, Field] = {
    "type": Field(text, required=True),
    "name": Field(text),
    "disable_parallel_tool_use": Field(boolean, False),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}


@described({"type": "object", "properties": {"type": {"enum": [*_CHOICES]}}, "required": ["type"]})
def tool_choice(value: Any, path: str) -> Json:
    choice = read(mapping(value, path), _CHOICE, {}, f"{path}.")
    if choice["type"] not in _CHOICES:
        raise refuse(f"{path}.type", choice["type"], ", ".join(_CHOICES))
    named = {"type": "function", "function": {"name": choice["name"]}}
    if (choice["name"] is None) == (choice["type"] == "tool"):
        raise refuse(f"{path}.name", choice["name"], 'a name where the type is "tool", else none')
    return {
        "tool_choice": _CHOICES[choice["type"]] or named,
        "parallel_tool_calls": not choice["disable_parallel_tool_use"],
    }


_THINKING_TYPE: dict[str, Field] = {"type": Field(text, required=True)}
_BUDGET: dict[str, Field] = {"budget_tokens": Field(integer(1, MAX_TOKENS), required=True)}
_DISPLAY: dict[str, Parse] = {"display": only("summarized")}


def _thinking_schema() -> Json:
    kinds = {"enabled": _BUDGET, "adaptive": {}, "disabled": {}}
    shapes = []
    for kind, more in kinds.items():
        kind_of = {"type": Field(only(kind), required=True)}
        shapes.append(object_schema(kind_of | more, _DISPLAY))
    return {"anyOf": shapes}


@described(_thinking_schema())
def thinking(value: Any, path: str) -> Json:
    match mapping(value, path).get("type"):
        case "enabled":
            given = read(value, _THINKING_TYPE | _BUDGET, _DISPLAY, f"{path}.")
            return {"thinking_token_budget": given["budget_tokens"]}
        case "adaptive" | "disabled" as kind:
            read(value, _THINKING_TYPE, _DISPLAY, f"{path}.")
            return {"reasoning_effort": "none"} if kind == "disabled" else {}
        case kind:
            raise refuse(f"{path}.type", kind, "enabled, adaptive or disabled")


_FORMAT: dict[str, Field] = {
    "type": Field(only("json_schema"), required=True),
    "schema": Field(mapping, required=True),
}


def output_format(value: Any, path: str) -> Json:
    given = read(mapping(value, path), _FORMAT, {}, f"{path}.")
    schema = {"name": "answer", "schema": given["schema"]}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def output_config(value: Any, path: str) -> Json:
    return read(mapping(value, path), {"format": Field(output_format, {})}, {}, f"{path}.")[
        "format"
    ]


PROMPT: dict[str, Field] = {
    "model": Field(text),
    "messages": Field(messages, required=True),
    "system": Field(text_blocks),
    "tools": Field(list_of(tool)),
    "tool_choice": Field(tool_choice, {}),
    "thinking": Field(thinking, {}),
    "output_format": Field(output_format, {}),
    "output_config": Field(output_config, {}),
}
"""Fields of /v1/messages/count_tokens."""
FIELDS: dict[str, Field] = {
    **PROMPT,
    "max_tokens": Field(integer(1, MAX_TOKENS), required=True),
    "stop_sequences": Field(list_of(text)),
    "stream": Field(boolean, False),
    "temperature": Field(bounded(number, minimum=0, maximum=1)),
    "top_k": Field(integer(0, 2**31 - 1)),
    "top_p": Field(bounded(number, exclusiveMinimum=0, maximum=1)),
    "metadata": Field(mapping, {}),
}
NO_OPS: dict[str, Parse] = {
    "cache_control": mapping,
    "container": only(),
    "context_management": only(),
    "diagnostics": only(),
    "inference_geo": only("global"),
    "mcp_servers": only([]),
    "service_tier": only("auto", "standard_only"),
    "speed": only("standard"),
}


def parse_messages(body: Json, limits: Limits) -> ChatRequest:
    """Reads the JSON body of /v1/messages.

    Raises:
        InvalidRequestError: names the field at fault.
    """
    values = read(body, FIELDS, NO_OPS)
    temperature, most = values["temperature"], values["max_tokens"]
    if temperature is not None and not 0 <= temperature <= 1:
        raise refuse("temperature", temperature, "0 to 1")
    budget = values["thinking"].get("thinking_token_budget", 0)
    if budget >= most:
        raise refuse("thinking.budget_tokens", budget, f"less than max_tokens ({most})")
    names = {"stop_sequences": "stop"}
    alike = [name for name in FIELDS if name not in PROMPT and name != "metadata"]
    optional = {names.get(name, name): values[name] for name in alike if values[name] is not None}
    user = read(values["metadata"], {"user_id": Field(text)}, {}, "metadata.")["user_id"]
    if user:
        optional["user"] = user
    return _chat(values, limits, **optional)


def parse_count(body: Json, limits: Limits) -> ChatRequest:
    """Reads the JSON body of /v1/messages/count_tokens. Raises InvalidRequestError."""
    return _chat(read(body, PROMPT, NO_OPS), limits)


def _chat(values: Json, limits: Limits, **optional: Any) -> ChatRequest:
    """The chat completion that has the same prompt and bounds, and these fields."""
    said = values["messages"]
    if values["system"] is not None:
        said = [{"role": "system", "content": values["system"]}, *said]
    chat: Json = {"model": values["model"], "messages": said, **optional}
    if said[-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if values["tools"]:
        chat["tools"] = values["tools"]
    for name in ("tool_choice", "thinking", "output_format", "output_config"):
        chat |= values[name]
    with naming_fields():
        request = parse_chat(chat, limits)
    thinks = "thinking_token_budget" in values["thinking"]
    return replace(request, prompt=replace(request.prompt, thinks=thinks))


_OTHER_NAMES = (
    (re.compile(r"\bthinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\breasoning_effort\b"), "thinking.type"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_format"),
    (re.compile(r"\b(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
)


@contextmanager
def naming_fields() -> Iterator[None]:
    """Refusals of what chat completions share name the fields of this API."""
    try:
        yield
    except InvalidRequestError as error:
        raise renamed(error, _OTHER_NAMES) from error
