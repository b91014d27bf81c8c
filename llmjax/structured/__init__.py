"""What outputs are bound to: a schema, grammar or regex, by llguidance; tokens and words."""

from .compiler import GrammarCompiler, Rules, check_json
from .constraint import Constraint, fill_masks
from .lark import lark_json, lark_text

__all__ = [
    "Constraint",
    "GrammarCompiler",
    "Rules",
    "check_json",
    "fill_masks",
    "lark_json",
    "lark_text",
]
