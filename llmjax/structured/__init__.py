"""What outputs are bound to: a schema, grammar or regex, by llguidance; tokens and words."""

from .closing import closed
from .compiler import GrammarCompiler, Rules, check_json
from .constraint import Constraint, fill_masks
from .lark import lark_json, lark_text

__all__ = [
    "Constraint",
    "GrammarCompiler",
    "Rules",
    "check_json",
    "closed",
    "fill_masks",
    "lark_json",
    "lark_text",
]
