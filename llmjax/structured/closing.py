"""Objects with the properties that a schema lists, and no others."""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_LISTS = ("anyOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "contains")
_PARTS = frozenset(
    (
        *("oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"),
        *("patternProperties", "unevaluatedProperties", "propertyNames", "$dynamicRef"),
    )
)
"""Keywords by which what a property means is not for the object's own list to say."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with `additionalProperties` false in objects that list their properties.

    That is what a client means by a class of its own, what OpenAI's strict mode asks for, and what
    keeps a model from going on and on with properties that nobody wants. Where a schema says
    something of them itself that stays; one in which objects are put together out of parts
    (`allOf` of several, `oneOf`, `patternProperties`, a `$ref` beside properties, ...) stays as it
    is, as no part knows the properties of the others.
    """
    return _close(schema) if not _has_parts(schema) else schema


def _has_parts(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if not _PARTS.isdisjoint(schema):
        return True
    in_place = [key for key in ("$ref", "allOf", "anyOf", "properties") if key in schema]
    of_all = schema.get("allOf")
    return (
        len(in_place) > 1
        or (isinstance(of_all, list) and len(of_all) > 1)
        or any(map(_has_parts, _below(schema)))
    )


def _below(schema: dict[str, Any]) -> list[Any]:
    """The schemas within one."""
    maps = (schema[key] for key in _MAPS if isinstance(schema.get(key), dict))
    lists = (schema[key] for key in _LISTS if isinstance(schema.get(key), list))
    found = [one for each in maps for one in each.values()]
    found += [one for each in lists for one in each]
    return found + [schema[key] for key in _ONES if key in schema]


def _close(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            new[key] = {name: _close(one) for name, one in schema[key].items()}
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            new[key] = [_close(one) for one in schema[key]]
    for key in _ONES:
        if key in schema:
            new[key] = _close(schema[key])
    if _lists_all(schema):
        new["additionalProperties"] = False
    return new


def _lists_all(schema: dict[str, Any]) -> bool:
    """Whether an object's list is all there is to say of its properties, and enough for it."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or "additionalProperties" in schema:
        return False
    least = schema.get("minProperties", 0)
    is_enough = isinstance(least, int | float) and least <= len(listed)
    return is_enough and isinstance(required, list) and set(map(str, required)) <= set(listed)
