"""What outputs are bound to: a schema, grammar or regex, by llguidance; tokens and words."""

from .compiler import GrammarCompiler, Rules
from .constraint import Constraint, fill_masks

__all__ = ["Constraint", "GrammarCompiler", "Rules", "fill_masks"]
