"""Pieces of Lark grammars in llguidance's dialect.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..structured_outputs import Reasoning
from .formats import without_unknown_formats

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,8}"
"""Between the tokens of JSON: no model fills its answer with nothing."""


def lark_text(text: str, special: Mapping[str, int]) -> str:
    """An expression for a text, in which special tokens are themselves.

    Args:
        special: their ids, by their texts.
    """
    if not special:
        return json.dumps(text) if text else ""
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    written = [f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts]
    return " ".join(one for one, part in zip(written, parts, strict=True) if part)


def lark_json(schema: Mapping[str, Any]) -> str:
    """An expression for JSON of a schema."""
    known = without_unknown_formats(schema)
    text = json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **known})
    # Not to be taken for GBNF.
    return "%json " + text.replace("::=", r"::\u003d")


def or_calls(grammar: str, calls: str) -> str:
    """A grammar of which `grammar` is one half; Lark of `calls` is the other."""
    start = {"name": "start", "lark_grammar": "start: @format | @calls"}
    return _compose(start, *_named("format", grammar), {"name": "calls", "lark_grammar": calls})


def after_reasoning(grammar: str, reasoning: Reasoning, special: Mapping[str, int]) -> str:
    """A grammar of which `grammar` is what comes after the reasoning."""
    end = lark_text(reasoning.end, special)
    thought = f"thought: TEXT {end}" if reasoning.end in special else f"thought[lazy]: TEXT {end}"
    begin = f"({lark_text(reasoning.begin, special)} thought SPACE?)?"
    lines = [
        f"start: {'thought SPACE?' if reasoning.is_open else begin} @answer",
        thought,
        r"TEXT: /(?s:.*)/",
        r"SPACE: /[ \n]{1,4}/",
    ]
    start = {"name": "start", "lark_grammar": "\n".join(lines)}
    return _compose(start, *_named("answer", grammar))


def _named(name: str, grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar, the first of which others know by a name."""
    if not grammar.startswith("{"):
        return [{"name": name, "lark_grammar": grammar}]
    first, *more = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *more]


def _compose(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})
