"""Structured output: JSON of a schema, text of a grammar or a regex, by llguidance."""

from .compiler import Grammar, GrammarCompiler, check_json
from .constraint import Constraint, fill_masks
from .lark import lark_json, lark_text

__all__ = [
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "check_json",
    "fill_masks",
    "lark_json",
    "lark_text",
]
