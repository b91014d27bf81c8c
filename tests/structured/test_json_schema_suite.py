"""The JSON Schema Test Suite: what it marks as invalid is never allowed.

What is valid may be refused as a whole (keywords that are not supported), or narrowed: one spelling
of a number, one order of keys, formats that are kept to.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from llmjax import SamplingParams, StructuredOutputs
from llmjax.errors import InvalidRequestError
from llmjax.structured import GrammarCompiler, lark_json
from llmjax.structured.formats import without_unknown_formats
from llmjax.tokenizer import tokenizer_from_folder

SHARED = Path(os.environ.get("LLMJAX_SHARED", Path(__file__).parents[3] / "shared"))
SUITE = SHARED / "data/json-schema/JSON-Schema-Test-Suite-draft7-2020-12.tar.gz"
NARROWED = {"allOf", "const", "enum", "format", "ref", "type"}
"""Files some of whose valid instances are not allowed."""
CLOSED = {"additionalProperties", "anyOf", "properties"}
"""And where objects have no properties but those that are listed."""


@pytest.fixture(scope="module")
def compiler(tiny_model):
    compiler = GrammarCompiler(tokenizer_from_folder(tiny_model), 320)
    yield compiler
    compiler.close()


def groups(draft: str):
    with tarfile.open(SUITE) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parts[-3:-1] == ("tests", draft) and path.suffix == ".json":
                for group in json.load(archive.extractfile(member)):  # type: ignore[arg-type]
                    yield path.stem, group


def allows(rules, text: str, tokenizer) -> bool:
    matcher = rules.start(4096).matcher
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.consume_token, tokens)) and matcher.is_accepting()


@pytest.mark.skipif(not SUITE.exists(), reason="the shared data is not here")
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_what_is_invalid_is_never_allowed(compiler, tiny_model, draft, closes):
    tokenizer = tokenizer_from_folder(tiny_model)
    compiled, narrowed = 0, []
    for name, group in groups(draft):
        schema = json.dumps(group["schema"])
        bound = StructuredOutputs(json=schema, disable_additional_properties=closes)
        try:
            rules = compiler.compile(SamplingParams(structured_outputs=bound)).result()
        except InvalidRequestError:
            continue
        compiled += 1
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            if allows(rules, text, tokenizer) and not test["valid"]:
                raise AssertionError(f"{schema} allows {text}")
            if test["valid"] and not allows(rules, text, tokenizer):
                narrowed.append((name, schema, text))
    assert compiled > 120
    assert {name for name, *_ in narrowed} <= (NARROWED | CLOSED if closes else NARROWED), narrowed
    assert len(narrowed) < (70 if closes else 40)


@pytest.mark.skipif(not SUITE.exists(), reason="the shared data is not here")
@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_unknown_formats_are_ignored(compiler, tiny_model, draft):
    tokenizer = tokenizer_from_folder(tiny_model)
    with tarfile.open(SUITE) as archive:
        name = next(
            n for n in archive.getnames() if n.endswith(f"{draft}/optional/format/unknown.json")
        )
        (group,) = json.load(archive.extractfile(name))  # type: ignore[arg-type]
    rules = rules_of(compiler, group["schema"])
    for test in group["tests"]:
        assert test["valid"] and allows(rules, json.dumps(test["data"]), tokenizer)


def rules_of(compiler, schema):
    wanted = SamplingParams(structured_outputs=StructuredOutputs(json=schema))
    return compiler.compile(wanted).result()


def test_a_format_binds_where_it_is_known(compiler, tiny_model):
    tokenizer = tokenizer_from_folder(tiny_model)
    day = rules_of(compiler, {"type": "string", "format": "date"})
    assert allows(day, '"2024-02-29"', tokenizer) and not allows(day, '"soon"', tokenizer)
    price = rules_of(compiler, {"type": "string", "format": "price", "maxLength": 4})
    assert allows(price, '"5 €"', tokenizer) and not allows(price, '"5.000"', tokenizer)
    for name in ("regex", "json-pointer", "iri"):
        with pytest.raises(InvalidRequestError, match=f"Unknown format: {name}"):
            rules_of(compiler, {"type": "string", "format": name})


def test_what_only_looks_like_a_format_stays():
    schema = {
        "properties": {
            "format": {"type": "string", "format": "price"},
            "const": {"format": "price"},
            "default": {"enum": [{"format": "price"}], "format": "uuid"},
        },
        "$defs": {"enum": {"anyOf": [{"format": "price", "const": {"format": "price"}}]}},
        "examples": [{"format": "price"}],
        "elsewhere": {"x": {"format": "price", "type": "string"}},
    }
    assert without_unknown_formats(schema) == {
        "properties": {
            "format": {"type": "string"},
            "const": {},
            "default": {"enum": [{"format": "price"}], "format": "uuid"},
        },
        "$defs": {"enum": {"anyOf": [{"const": {"format": "price"}}]}},
        "examples": [{"format": "price"}],
        "elsewhere": {"x": {"type": "string"}},
    }
    assert "price" not in lark_json({"type": "string", "format": "price"})
