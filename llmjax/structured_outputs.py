"""What an output is to be bound to, as a request asks for it. No jax."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .checks import require, type_errors
from .errors import InvalidRequestError


class Reasoning(NamedTuple):
    """What a model writes before its answer: anything, between two texts.

    Attributes:
        is_open: the prompt has written `begin`; else the model may write it or not.
    """

    begin: str
    end: str
    is_open: bool


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What an output must be: one of the first six; fields as vLLM's.

    Attributes:
        json: a JSON schema, as an object or as text.
        json_object: any JSON object.
        regex: a regular expression of Rust's `regex`, that matches the whole output.
        choice: the texts there are to choose from.
        grammar: in Lark's syntax, or in GBNF or EBNF (rules with `::=`).
        structural_tag: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`: free
            text, in which JSON of a schema follows each beginning.
        disable_any_whitespace: none between the tokens of JSON.
        disable_additional_properties: objects of a schema `json` have the properties that it
            lists and no others, unless it says so itself; see `structured/closing.py`.
        whitespace_pattern: a regular expression of what may be there; by default up to 8
            spaces, tabs and line breaks.
        or_calls: a grammar in Lark's syntax of the calls that may stand in its place.
        after: the reasoning that comes first and is bound to nothing.
        asked_as: what messages call it; by default `structured_outputs.` and the kind.

    Raises:
        InvalidRequestError: a value is of the wrong type, or there is not one of the six.
    """

    json: str | dict | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    or_calls: str | None = None
    after: Reasoning | None = None
    asked_as: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, message in type_errors(self):
            raise InvalidRequestError(
                f"structured_outputs.{message}", param=f"structured_outputs.{name}"
            )
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, _as_text(value, name))
        if self.choice is not None:
            ok = bool(self.choice) and all(self.choice)
            require(ok, "structured_outputs.choice", self.choice, "non-empty texts")
            object.__setattr__(self, "choice", tuple(self.choice))
        if len(self._kinds) != 1:
            allowed = "exactly one of " + ", ".join(_KINDS)
            require(False, "structured_outputs", " and ".join(self._kinds) or None, allowed)

    @property
    def kind(self) -> str:
        return self._kinds[0]

    @property
    def value(self) -> Any:
        return getattr(self, self.kind)

    @property
    def size(self) -> int:
        """Characters of what it asks for."""
        texts = self.value if self.kind == "choice" else (self.value, self.or_calls)
        return sum(len(text) for text in texts if isinstance(text, str))

    @property
    def label(self) -> str:
        return self.asked_as or f"structured_outputs.{self.kind}"

    @property
    def _kinds(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False)]


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def _as_text(value: dict, name: str) -> str:
    """An object as JSON, which can be compared."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        param = f"structured_outputs.{name}"
        raise InvalidRequestError(f"{param} is no JSON: {error}", param=param) from error
