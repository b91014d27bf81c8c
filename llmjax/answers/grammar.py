"""Grammars of calls, for requests that must make one, or whose functions are strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..structured import check_json, closed, lark_json, lark_text
from ..structured_outputs import StructuredOutputs
from .syntaxes import Frame
from .tools import Tool, ToolUse


def calls_grammar(frame: Frame, use: ToolUse, special: Mapping[str, int]) -> StructuredOutputs:
    """One call or more of `use.tools`, whose arguments keep to their schemas.

    Args:
        special: ids of special tokens by their texts.

    Raises:
        InvalidRequestError: names the function whose schema cannot be kept to.
    """
    more = use.parallel and frame.separator is not None
    calls = f"call ({lark_text(frame.separator or '', special)} call)*" if more else "call"
    opening, closing = (lark_text(text, special) for text in (frame.opening, frame.closing))
    schemas = [checked(tool, use) for tool in use.tools]
    rules = [f"start: {opening} {calls} {closing}", *_call_rules(frame, "", use, schemas, special)]
    return StructuredOutputs(grammar="\n".join(rules), asked_as="tools")


def strict_grammar(
    frame: Frame, marker: str, use: ToolUse, special: Mapping[str, int]
) -> StructuredOutputs:
    """Any text; but behind each marker a call, whose arguments keep to a schema where strict.

    Raises:
        InvalidRequestError: names the function whose schema cannot be kept to.
    """
    schemas = [checked(tool, use) if tool.strict else {"type": "object"} for tool in use.tools]
    rules = [
        "start: (begin call)* TEXT",
        f"begin{'' if marker in special else '[lazy]'}: TEXT {lark_text(marker, special)}",
        r"TEXT: /(?s:.*)/",
        *_call_rules(frame, marker, use, schemas, special),
    ]
    return StructuredOutputs(grammar="\n".join(rules), asked_as="tools")


def _call_rules(
    frame: Frame,
    marker: str,
    use: ToolUse,
    schemas: list[dict[str, Any]],
    special: Mapping[str, int],
) -> list[str]:
    """Rules of a `call` of any tool, behind its marker."""
    names = [f"call_{i}" for i in range(len(use.tools))]
    rules = [f"call: {' | '.join(names)}"]
    tail = lark_text(frame.tail, special)
    for name, tool, schema in zip(names, use.tools, schemas, strict=True):
        head = lark_text(frame.head_of(tool.name).removeprefix(marker), special)
        rules.append(f"{name}: {head} {lark_json(schema)} {tail}")
    return rules


def checked(tool: Tool, use: ToolUse) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object, of those that it lists."""
    schema = {"type": "object", **tool.parameters}
    check_json(schema, f"tools[{use.offered.index(tool)}].function.parameters")
    return closed(schema)
