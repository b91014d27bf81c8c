"""What an output must be: `response_format` (OpenAI's) and `structured_outputs` (vLLM's)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.errors import InvalidRequestError
from llmjax.structured_outputs import StructuredOutputs

from .fields import (
    Field,
    Parse,
    array,
    boolean,
    described,
    list_of,
    mapping,
    object_schema,
    only,
    read,
    refuse,
    text,
)


@described({"type": ["object", "string"]})
def json_or_text(value: Any, path: str) -> dict | str:
    if not isinstance(value, dict | str):
        raise refuse(path, value, "an object, or one as text")
    return value


_FORMATS: dict[str, dict[str, Field]] = {
    "text": {},
    # Hugging Face's InferenceClient writes what it is given as "json_schema" so.
    "json_object": {"value": Field(mapping)},
    "json_schema": {"json_schema": Field(mapping, required=True)},
    "structural_tag": {
        "structures": Field(array, required=True),
        "triggers": Field(list_of(text), required=True),
    },
}
"""The fields of each `type` of a `response_format`."""

_JSON_SCHEMA: dict[str, Field] = {"schema": Field(mapping, required=True)}
# A grammar is always kept to, as `strict` asks for.
_JSON_SCHEMA_NO_OPS: dict[str, Parse] = {"name": text, "description": text, "strict": boolean}

_STRUCTURED: dict[str, Field] = {
    "json": Field(json_or_text),
    "json_object": Field(boolean),
    "regex": Field(text),
    "choice": Field(list_of(text)),
    "grammar": Field(text),
    "structural_tag": Field(json_or_text),
    "disable_any_whitespace": Field(boolean, False),
    "disable_additional_properties": Field(boolean, False),
    "whitespace_pattern": Field(text),
}


_STRUCTURED_NO_OPS: dict[str, Parse] = {"_backend": only("auto", "guidance")}


def _format_schema() -> dict[str, Any]:
    formats = []
    for kind, fields in _FORMATS.items():
        schema = object_schema(fields | {"type": Field(only(kind), required=True)})
        if kind == "json_schema":
            inner = object_schema(_JSON_SCHEMA, _JSON_SCHEMA_NO_OPS)
            schema["properties"]["json_schema"] = inner
        formats.append(schema)
    return {"anyOf": formats}


@described(_format_schema())
def response_format(value: Any, path: str) -> StructuredOutputs | None:
    kind = mapping(value, path).get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise refuse(f"{path}.type", kind, ", ".join(_FORMATS))
    values = read(value, _FORMATS[kind], {"type": text}, f"{path}.")
    if kind == "text":
        return None
    if kind == "json_object" and values["value"] is not None:
        return _bound_to(values["value"], f"{path}.value")
    if kind == "json_object":
        return StructuredOutputs(json_object=True, asked_as=path)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=values, asked_as=path)
    path = f"{path}.json_schema"
    schema = read(values["json_schema"], _JSON_SCHEMA, _JSON_SCHEMA_NO_OPS, f"{path}.")["schema"]
    return _bound_to(schema, f"{path}.schema")


def _bound_to(schema: dict[str, Any], asked_as: str) -> StructuredOutputs:
    return StructuredOutputs(json=schema, disable_additional_properties=True, asked_as=asked_as)


@described(object_schema(_STRUCTURED, _STRUCTURED_NO_OPS))
def structured_outputs(value: Any, path: str) -> StructuredOutputs:
    values = read(mapping(value, path), _STRUCTURED, _STRUCTURED_NO_OPS, f"{path}.")
    return StructuredOutputs(**values)


FIELDS: dict[str, Field] = {
    "response_format": Field(response_format),
    "structured_outputs": Field(structured_outputs),
}


def wanted(values: Mapping[str, Any]) -> StructuredOutputs | None:
    """What a request that was read by a table with FIELDS in it asks for.

    Raises:
        InvalidRequestError: both fields are there.
    """
    theirs, ours = values["response_format"], values["structured_outputs"]
    if theirs is not None and ours is not None:
        raise InvalidRequestError(
            "structured_outputs and response_format exclude each other", param="structured_outputs"
        )
    return theirs or ours
