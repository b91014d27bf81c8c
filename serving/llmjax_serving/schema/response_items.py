"""Items of a conversation in the Responses API: how they are read, and the messages they are."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from llmjax.errors import InvalidRequestError

from .chat import arguments
from .fields import (
    Field,
    Parse,
    array,
    described,
    list_of,
    mapping,
    only,
    read,
    refuse,
    schema_of,
    text,
)

Item = dict[str, Any]
"""As answers list it: with an id, and content in parts."""

ROLES = ("user", "assistant", "system", "developer")
STATUSES = ("in_progress", "completed", "incomplete")


def new_item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def output_text(said: str, logprobs: list[Any] | None = None) -> Item:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": logprobs or []}


def _status(value: Any, path: str) -> str:
    if value not in STATUSES:
        raise refuse(path, value, ", ".join(STATUSES))
    return value


_ID: dict[str, Field] = {"id": Field(text), "status": Field(_status, "completed")}
_TYPE: dict[str, Parse] = {"type": text}


def _parts(value: Any, path: str, *, of_assistant: bool = False) -> list[Item]:
    """Parts of a message; a string is one part of text."""
    if isinstance(value, str):
        return [output_text(value) if of_assistant else {"type": "input_text", "text": value}]
    read_part = _said_part if of_assistant else _given_part
    return [read_part(part, f"{path}[{i}]") for i, part in enumerate(array(value, path))]


def _given_part(value: Any, path: str) -> Item:
    kind = mapping(value, path).get("type")
    if kind != "input_text":
        raise refuse(f"{path}.type", kind, "input_text (the model reads text only)")
    no_ops = _TYPE | {"prompt_cache_breakpoint": only()}
    part = read(value, {"text": Field(text, required=True)}, no_ops, f"{path}.")
    return {"type": "input_text", "text": part["text"]}


def _said_part(value: Any, path: str) -> Item:
    kind = mapping(value, path).get("type")
    if kind == "refusal":
        part = read(value, {"refusal": Field(text, required=True)}, _TYPE, f"{path}.")
        return {"type": "refusal", "refusal": part["refusal"]}
    if kind == "output_text":
        no_ops = _TYPE | {"annotations": array, "logprobs": array}
        part = read(value, {"text": Field(text, required=True)}, no_ops, f"{path}.")
        return output_text(part["text"])
    if kind == "input_text":
        return output_text(_given_part(value, path)["text"])
    raise refuse(f"{path}.type", kind, "output_text, refusal or input_text")


def _message(value: Item, path: str) -> Item:
    table = {"role": Field(text, required=True), "content": Field(_anything, required=True)}
    given = read(value, _ID | table, _TYPE | {"phase": text}, f"{path}.")
    role = given["role"]
    if role not in ROLES:
        raise refuse(f"{path}.role", role, ", ".join(ROLES))
    content = _parts(given["content"], f"{path}.content", of_assistant=role == "assistant")
    return _item("message", "msg", given) | {"role": role, "content": content}


def _anything(value: Any, path: str) -> Any:
    return value


def _function_call(value: Item, path: str) -> Item:
    table = {name: Field(text, required=True) for name in ("call_id", "name", "arguments")}
    no_ops = _TYPE | {"caller": only(), "namespace": only()}
    call = read(value, _ID | table, no_ops, f"{path}.")
    arguments(call["arguments"], f"{path}.arguments")
    return _item("function_call", "fc", call) | {name: call[name] for name in table}


def _function_call_output(value: Item, path: str) -> Item:
    table = {
        "call_id": Field(text, required=True),
        "output": Field(_output, required=True),
        "name": Field(text),
    }
    no_ops = _TYPE | {"caller": only(), "namespace": only()}
    told = read(value, _ID | table, no_ops, f"{path}.")
    fields = {name: told[name] for name in table if told[name] is not None}
    return _item("function_call_output", "fco", told) | fields


def _output(value: Any, path: str) -> str | list[Item]:
    return value if isinstance(value, str) else _parts(value, path)


def _texts_of(kind: str) -> Parse:
    def parse(value: Any, path: str) -> Item:
        part = read(mapping(value, path), _TEXT_OF, {}, f"{path}.")
        if part["type"] != kind:
            raise refuse(f"{path}.type", part["type"], kind)
        return {"type": kind, "text": part["text"]}

    return list_of(parse)


_TEXT_OF = {"type": Field(text, required=True), "text": Field(text, required=True)}
_REASONING = {
    "summary": Field(_texts_of("summary_text"), []),
    "content": Field(_texts_of("reasoning_text"), []),
}


def _reasoning(value: Item, path: str) -> Item:
    thought = read(value, _ID | _REASONING, _TYPE | {"encrypted_content": only()}, f"{path}.")
    return _item("reasoning", "rs", thought) | {name: thought[name] for name in _REASONING}


def _reference(value: Item, path: str) -> Item:
    given = read(value, {"id": Field(text, required=True)}, _TYPE, f"{path}.")
    return {"type": "item_reference", "id": given["id"]}


def _item(kind: str, prefix: str, given: Item) -> Item:
    return {
        "id": given["id"] or new_item_id(prefix),
        "type": kind,
        "status": given["status"],
    }


_KINDS = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
    "item_reference": _reference,
}


@described({"type": "object", "properties": {"type": {"enum": [*_KINDS]}}})
def item(value: Any, path: str) -> Item:
    kind = mapping(value, path).get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference" if "id" in value else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise refuse(f"{path}.type", kind, ", ".join(_KINDS))
    return _KINDS[kind](value, path)


@described({"anyOf": [{"type": "string"}, {"type": "array", "items": schema_of(item)}]})
def items(value: Any, path: str) -> list[Item]:
    """Items; a string is what the user says."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return list_of(item)(value, path)


def check_calls(history: Iterable[Item], given: list[Item]) -> None:
    """Raises InvalidRequestError where a function's output answers no call."""
    calls = {one["call_id"] for one in history if one["type"] == "function_call"}
    for i, one in enumerate(given):
        if one["type"] == "function_call":
            calls.add(one["call_id"])
        elif one["type"] == "function_call_output" and one["call_id"] not in calls:
            path = f"input[{i}].call_id"
            raise refuse(path, one["call_id"], "the call_id of a function_call before it")


def messages(conversation: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """A conversation as chat completions have it.

    What an assistant's turn is made of (reasoning, text, calls) becomes one message, as chat
    templates expect. So do system messages at the beginning, of which they know one.
    """
    told: list[dict[str, Any]] = []
    if instructions:
        told.append({"role": "system", "content": instructions})
    said: dict[str, Any] | None = None
    for one in conversation:
        kind, role = one["type"], one.get("role")
        if kind in ("reasoning", "function_call") or role == "assistant":
            if said is None or _begins_anew(one, said):
                said = {"role": "assistant"}
                told.append(said)
            _add(said, one)
            continue
        said = None
        if kind == "function_call_output":
            message = {"role": "tool", "tool_call_id": one["call_id"]}
            message |= {"name": one["name"]} if "name" in one else {}
            told.append(message | {"content": _text(one["output"])})
        else:
            role = "user" if role == "user" else "system"
            message = {"role": role, "content": _text(one["content"])}
            if role == "system" and len(told) == 1 and told[0]["role"] == "system":
                told[0]["content"] += "\n\n" + message["content"]
            else:
                told.append(message)
    return told


def _begins_anew(one: Item, said: dict[str, Any]) -> bool:
    """Whether an assistant's item stands behind what its message may have before it."""
    earlier = {"reasoning": {"reasoning_content", "content", "tool_calls"}}
    earlier["message"] = {"content", "tool_calls"}
    return not earlier.get(one["type"], set()).isdisjoint(said)


def _add(said: dict[str, Any], one: Item) -> None:
    if one["type"] == "reasoning":
        said["reasoning_content"] = _text(one["content"] or one["summary"])
    elif one["type"] == "message":
        said["content"] = _text(one["content"])
    else:
        function = {"name": one["name"], "arguments": one["arguments"]}
        call = {"id": one["call_id"], "type": "function", "function": function}
        said.setdefault("tool_calls", []).append(call)


def _text(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


def resolved(given: list[Item], known: dict[str, Item]) -> list[Item]:
    """`given`, with what references refer to.

    Raises:
        InvalidRequestError: something that is not known.
    """
    for i, one in enumerate(given):
        if one["type"] == "item_reference" and one["id"] not in known:
            message = f"input[{i}].id: there is no stored item {one['id']!r}"
            raise InvalidRequestError(message, param=f"input[{i}].id")
    return [known[one["id"]] if one["type"] == "item_reference" else one for one in given]
