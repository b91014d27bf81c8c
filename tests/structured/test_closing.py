"""Which objects of a schema are closed, and which are not."""

from __future__ import annotations

import json

import pytest

from llmjax import SamplingParams, StructuredOutputs
from llmjax.structured import GrammarCompiler, closed
from llmjax.tokenizer import tokenizer_from_folder

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
NO_MORE = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, A | NO_MORE),
        ({"type": "array", "items": A}, {"type": "array", "items": A | NO_MORE}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | NO_MORE, {"type": "null"}]}),
        (
            {"allOf": [A], "title": "as pydantic 1"},
            {"allOf": [A | NO_MORE], "title": "as pydantic 1"},
        ),
        (
            {"properties": {"not": A}, "$defs": {"if": B}},
            {"properties": {"not": A | NO_MORE}, "$defs": {"if": B | NO_MORE}, **NO_MORE},
        ),
        (
            {"type": "object", "additionalProperties": A},
            {"type": "object", "additionalProperties": A | NO_MORE},
        ),
    ],
)
def test_objects_that_list_their_properties_have_no_others(schema, expected):
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "string"}},
        A | {"required": ["a", "c"]},
        A | {"minProperties": 2},
        A | {"patternProperties": {"^x": {}}},
        A | {"allOf": [B]},
        A | {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
        {"allOf": [A, B]},
        {"oneOf": [A, B]},
        {"$ref": "#/$defs/b", "properties": {"c": {}}, "$defs": {"b": B}},
        {"type": "array", "items": {"if": A, "then": B}},
        {"allOf": 1, "properties": []},
    ],
)
def test_what_says_otherwise_or_has_parts_stays_as_it_is(schema):
    assert closed(schema) == schema


def test_the_grammar_closes_them_where_that_is_asked_for(tiny_model):
    tokenizer = tokenizer_from_folder(tiny_model)
    compiler = GrammarCompiler(tokenizer, 320)
    text = tokenizer.encode('{"a": 1, "b": 2}', add_special_tokens=False)
    allowed = []
    for closes in (False, True):
        bound = StructuredOutputs(json=A, disable_additional_properties=closes)
        rules = compiler.compile(SamplingParams(structured_outputs=bound)).result()
        matcher = rules.start(99).matcher
        allowed.append(all(map(matcher.consume_token, text)) and matcher.is_accepting())
    compiler.close()
    assert allowed == [True, False]
