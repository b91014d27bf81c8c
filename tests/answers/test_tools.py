"""`tools` and `tool_choice`: what they mean, and how refusals name the field at fault."""

from __future__ import annotations

import pytest

from llmjax.answers import ToolUse, read_tools
from llmjax.errors import InvalidRequestError

F = {"type": "function", "function": {"name": "f", "description": "does"}}
G = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "g"}}


def allowing(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([1], "tools[0]"),
        ([F, {"function": F["function"]}], "tools[1].type"),
        ([{**F, "type": "code"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{**F, "extra": 1}], "tools[0].extra"),
        (function(colour="red"), "tools[0].function.colour"),
        (function(name=""), "tools[0].function.name"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name="f\n"), "tools[0].function.name"),
        (function(description=1), "tools[0].function.description"),
        (function(parameters="{}"), "tools[0].function.parameters"),
        (function(parameters={"type": "string"}), "tools[0].function.parameters.type"),
        (function(strict="yes"), "tools[0].function.strict"),
        ([F, G, F], "tools[2].function.name"),
    ],
)
def test_tools_are_refused_by_name(tools, param):
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (5, "tool_choice"),
        ("any", "tool_choice"),
        ({"function": {"name": "f"}}, "tool_choice.type"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
        ({"type": "function", "name": "f"}, "tool_choice.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowing("any", NAMED), "tool_choice.allowed_tools.mode"),
        (allowing("auto"), "tool_choice.allowed_tools.tools"),
        (allowing("auto", {"type": "custom"}), "tool_choice.allowed_tools.tools[0].type"),
        (
            allowing("auto", NAMED, {"type": "function", "function": {"name": "h"}}),
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
    ],
)
def test_choices_are_refused_by_name(choice, param):
    with pytest.raises(InvalidRequestError) as caught:
        ToolUse.of(read_tools([F, G]), choice)
    assert caught.value.param == param


def test_what_the_choices_mean():
    tools = read_tools([F, G])
    named = NAMED
    assert ToolUse.of(tools, allowing("auto", named)) == ToolUse("auto", tools, tools[1:], True)
    required = ToolUse.of(tools, allowing("required", named, named), False)
    assert required == ToolUse("required", tools, tools[1:], False)
    assert ToolUse.of(tools, None) == ToolUse("auto", tools, tools, True)
    assert ToolUse.of(tools, "required", False) == ToolUse("required", tools, tools, False)
    assert ToolUse.of(tools, named) == ToolUse("function", tools, tools[1:], False)
    assert ToolUse.of(tools, "none") is None
    assert ToolUse.of((), None) is ToolUse.of((), "auto") is ToolUse.of((), "none") is None
    for choice in ("required", named):
        with pytest.raises(InvalidRequestError, match="without tools"):
            ToolUse.of((), choice)


def test_templates_are_told_of_functions_without_parameters_too():
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    expected = {"name": "f", "description": "does", "parameters": empty}
    assert read_tools([F])[0].as_dict() == {"type": "function", "function": expected}
    assert read_tools(function(strict=True))[0].strict
