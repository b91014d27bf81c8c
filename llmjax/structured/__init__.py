"""Structured output: JSON of a schema, text of a grammar or a regex, by llguidance."""

from .compiler import Grammar, GrammarCompiler
from .constraint import Constraint, fill_masks

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "fill_masks"]
