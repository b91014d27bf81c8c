"""What is refused before it is compiled."""

from __future__ import annotations

import pytest

from llmjax.errors import InvalidRequestError
from llmjax.structured.limits import check_choice, check_regex, check_schema

CYCLE = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    "regex",
    ["(a{1,9999}){1,9999}", "((a{100}){100}){100}", "a{200000}", "(" * 101 + ")" * 101],
)
def test_repetitions_that_come_to_too_much(regex):
    with pytest.raises(InvalidRequestError, match=r"regex: .*allowed") as caught:
        check_regex(regex, "regex")
    assert caught.value.param == "regex"


@pytest.mark.parametrize(
    "regex",
    [
        "a{1,9999}b{1,9999}",  # beside each other
        r"(\{9999\}){9999}",
        "[{9999}]{9999}",
        "(a{300}|b)*(c{300}){300}",
        "a{,9999",
        "(unbalanced",
        "",
    ],
)
def test_what_only_looks_like_it_is_left_to_the_compiler(regex):
    check_regex(regex, "regex")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**9},
        {"properties": {"a": {"type": "string", "minLength": 1e12}}},
        {"enum": [str(i) for i in range(30_000)]},
        {"type": "string", "pattern": "(a{1,9999}){1,9999}"},
        {"type": "object", "patternProperties": {"(a{1,9999}){1,9999}": {}}},
        {"$defs": {"A": CYCLE}, "properties": {"x": CYCLE}},
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": CYCLE}, "items": {"$ref": "#/$defs/B"}},
    ],
)
def test_schemas_that_are_too_much_or_go_round_in_circles(schema):
    with pytest.raises(InvalidRequestError, match="json: ") as caught:
        check_schema(schema, "json")
    assert caught.value.param == "json"


def test_a_schema_may_be_recursive_but_not_too_deep():
    node = {"type": "object", "properties": {"children": {"type": "array", "items": CYCLE}}}
    check_schema({"$defs": {"A": node}, "$ref": "#/$defs/A"}, "json")
    schema: dict = {}
    for _ in range(50):
        schema = {"items": [schema]}
    with pytest.raises(InvalidRequestError, match="levels deep"):
        check_schema({"items": schema}, "json")


def test_choices():
    check_choice(["a"] * 20_000, "choice")
    with pytest.raises(InvalidRequestError, match="30000 values"):
        check_choice(["a"] * 30_000, "choice")
