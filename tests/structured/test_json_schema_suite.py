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
from llmjax.structured import GrammarCompiler
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
    matcher = rules.start().matcher
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
