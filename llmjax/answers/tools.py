"""What a request says of tools, read and proved: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checks import shown
from ..errors import InvalidRequestError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of its arguments.
        strict: calls must keep to it, where the model chooses to call.
    """

    name: str
    parameters: dict[str, Any]
    description: str | None = None
    strict: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True)
class ToolUse:
    """Attributes:
    choice: "auto", "required", or "function": the one that `tools` then holds.
    offered: all functions that the model is told of.
    tools: those that it may call.
    parallel: it may call more than one at a time.
    """

    choice: str
    offered: tuple[Tool, ...]
    tools: tuple[Tool, ...]
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice != "auto"

    @classmethod
    def of(cls, offered: tuple[Tool, ...], choice: Any, parallel: bool = True) -> ToolUse | None:
        """What the fields of a request mean; None where there is nothing to call.

        Args:
            choice: OpenAI's `tool_choice`; None is "auto".

        Raises:
            InvalidRequestError: names the field at fault.
        """
        if choice is None:
            choice = "auto" if offered else "none"
        if not isinstance(choice, str | Mapping):
            raise _refuse("tool_choice", choice, _CHOICES)
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise _refuse("tool_choice", choice, _CHOICES)
        if not offered:
            if choice in ("none", "auto"):
                return None
            raise InvalidRequestError(
                f"tool_choice is {shown(choice)}, allowed without tools: none, auto",
                param="tool_choice",
            )
        if choice == "none":
            return None
        if isinstance(choice, str):
            return cls(choice, offered, offered, parallel)
        if choice.get("type") == "allowed_tools":
            mode, allowed = _allowed(choice, offered)
            return cls(mode, offered, allowed, parallel)
        return cls("function", offered, _chosen(choice, "tool_choice", offered), parallel=False)


_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


def read_tools(value: Any) -> tuple[Tool, ...]:
    """OpenAI's `tools`; None is none.

    Raises:
        InvalidRequestError: it is no list of functions with names of their own.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _refuse("tools", value, "a list of functions")
    tools = tuple(_read_tool(one, f"tools[{i}]") for i, one in enumerate(value))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise _refuse(f"tools[{i}].function.name", tool.name, "a name that no other tool has")
        names.add(tool.name)
    return tools


def _read_tool(value: Any, path: str) -> Tool:
    tool = _object(value, path, ("type", "function"))
    if tool.get("type") != "function":
        raise _refuse(f"{path}.type", tool.get("type"), '"function"')
    path = f"{path}.function"
    allowed = ("name", "description", "parameters", "strict")
    function = _object(tool.get("function"), path, allowed)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _refuse(f"{path}.name", name, "1 to 128 letters, digits, _, - and .")
    if not isinstance(description, str | None):
        raise _refuse(f"{path}.description", description, "a string")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise _refuse(f"{path}.parameters", parameters, "a JSON schema, an object")
    kind = (parameters or {}).get("type", "object")
    if kind != "object":
        raise _refuse(f"{path}.parameters.type", kind, '"object"')
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _refuse(f"{path}.strict", strict, "true or false")
    return Tool(name, parameters or NO_PARAMETERS, description, bool(strict))


def _allowed(choice: Any, offered: tuple[Tool, ...]) -> tuple[str, tuple[Tool, ...]]:
    """The mode, and those of the functions that may be called in it."""
    path = "tool_choice.allowed_tools"
    _object(choice, "tool_choice", ("type", "allowed_tools"))
    inner = _object(choice.get("allowed_tools"), path, ("mode", "tools"))
    mode, named = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise _refuse(f"{path}.mode", mode, "auto, required")
    if not isinstance(named, list) or not named:
        raise _refuse(f"{path}.tools", named, "a list of at least one function")
    found = [_chosen(one, f"{path}.tools[{i}]", offered) for i, one in enumerate(named)]
    return mode, tuple(tool for tool in offered if (tool,) in found)


def _chosen(choice: Any, path: str, offered: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The one that is named."""
    outer = _object(choice, path, ("type", "function"))
    if outer.get("type") != "function":
        raise _refuse(f"{path}.type", outer.get("type"), '"function"')
    name = _object(outer.get("function"), f"{path}.function", ("name",)).get("name")
    chosen = tuple(tool for tool in offered if tool.name == name)
    if not chosen:
        names = ", ".join(tool.name for tool in offered)
        raise _refuse(f"{path}.function.name", name, f"a function of tools ({names})")
    return chosen


def _object(value: Any, path: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(path, value, f"an object of {', '.join(keys)}")
    unknown = [key for key in value if key not in keys]
    if unknown:
        name = f"{path}.{unknown[0]}"
        raise InvalidRequestError(f"unknown field: {name}", param=name)
    return value


def _refuse(path: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path} is {shown(value)}, allowed: {allowed}", param=path)
