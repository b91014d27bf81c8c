"""What a chat request says of tools and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.answers import Tool, ToolUse, read_tools
from llmjax.answers.tools import NAME

from .fields import Field, boolean, bounded, described, integer, refuse

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_TOOL = {
    **_NAMED,
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}


@described({"type": "array", "items": _TOOL})
def tools(value: Any, path: str) -> tuple[Tool, ...]:
    return read_tools(value)


@described({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]})
def tool_choice(value: Any, path: str) -> Any:
    """Anything: which choices there are depends on the tools."""
    return value


@described({"enum": list(EFFORTS)})
def reasoning_effort(value: Any, path: str) -> str:
    if value not in EFFORTS:
        raise refuse(path, value, ", ".join(EFFORTS))
    return value


PROMPT: dict[str, Field] = {
    "tools": Field(tools, ()),
    "reasoning_effort": Field(reasoning_effort),
}
"""Fields that chat templates are told of."""

BUDGET: dict[str, Field] = {
    "thinking_token_budget": Field(bounded(integer(), minimum=0, maximum=2**31 - 1)),
}
"""Of the same name and meaning in SamplingParams, which holds its range."""

FIELDS: dict[str, Field] = {
    "tool_choice": Field(tool_choice),
    "parallel_tool_calls": Field(boolean, True),
    "include_reasoning": Field(boolean, True),
    **BUDGET,
}


def tool_use(values: Mapping[str, Any]) -> ToolUse | None:
    """What a request that was read by a table with these fields in it may call.

    Raises:
        InvalidRequestError: `tool_choice` is none of the choices there are.
    """
    return ToolUse.of(values["tools"], values["tool_choice"], values["parallel_tool_calls"])
