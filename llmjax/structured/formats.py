"""`format` in JSON schemas: an unknown one is an annotation, which binds nothing.

Source: JSON Schema Validation 2020-12, 7.2.3 (draft-07: 7.2): "An implementation MUST NOT fail to
collect unknown formats as annotations".
"""

from __future__ import annotations

from typing import Any

SPECIFIED = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Those of draft-04 to 2020-12. They are kept to, or refused where that cannot be done."""

_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are no schemas, whatever they look like."""
_NAMED = frozenset(
    (
        *("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs"),
        *("definitions", "$vocabulary"),
    )
)
"""Keywords whose values have names for keys, not keywords."""


def without_unknown_formats(schema: Any) -> Any:
    """A schema without its annotations by formats that no specification has."""
    if isinstance(schema, list):
        return [without_unknown_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in SPECIFIED:
            continue
        if key in _NAMED and isinstance(value, dict):
            kept[key] = {name: without_unknown_formats(one) for name, one in value.items()}
        else:
            kept[key] = value if key in _VALUES else without_unknown_formats(value)
    return kept
