"""A bound output comes to its end before its tokens are used up."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputs
from llmjax.structured import GrammarCompiler, fill_masks
from llmjax.structured.ending import LEAST_ROOM
from llmjax.tokenizer import tokenizer_from_folder

from .said import assert_idle
from .test_structured_outputs import PROMPT, SIZES

MEAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "day": {"type": "string", "format": "date"},
        "price": {"type": "number"},
        "hot": {"type": ["boolean", "null"]},
        "parts": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"of": {"enum": ["an egg", "a leaf"]}, "count": {"type": "integer"}},
                "required": ["of", "count"],
            },
        },
        "kind": {"type": "string", "pattern": "^[a-c]{4}$"},
    },
    "required": ["name", "day", "price", "hot", "parts", "kind"],
    "additionalProperties": False,
}
ENDLESS = {
    "texts": {"type": "array", "items": {"type": "string"}},
    "text": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "number": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 1},
    "objects": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name", "n"],
            "additionalProperties": False,
        },
    },
    "nested": {
        "$ref": "#/$defs/t",
        "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    },
    "anything": {"type": "object"},
}
FULL = (
    '{"name": "so\\n\\" é it}", "day": "2024-02-29", "price": -1.5e3, "hot": null, '
    '"parts": [{"of": "an egg", "count": 12}, {"of": "a leaf", "count": 0}], "kind": "abca"}'
)


@pytest.fixture(scope="module")
def compiler(tiny_model):
    compiler = GrammarCompiler(tokenizer_from_folder(tiny_model), 320)
    yield compiler
    compiler.close()


def rules_of(compiler, schema):
    wanted = StructuredOutputs(json=schema)
    return compiler.compile(SamplingParams(structured_outputs=wanted)).result()


def spoken(tokenizer, ids):
    return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")


def say(tokenizer, rules, room, script):
    """What comes of a model that says a script over and over, as far as it may, and whether that
    came to its end by itself."""
    constraint, said, at = rules.start(room), [], 0
    eos = sorted(tokenizer.eos_token_ids)[0]
    while len(said) < room and not constraint.is_complete:
        mask = np.zeros((1, 10), np.int32)
        fill_masks(mask, [(0, constraint)], parallel=False)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        turns = (script[(at + turn) % len(script)] for turn in range(len(script)))
        turn, token = next(((n, t) for n, t in enumerate(turns) if t in allowed), (0, allowed[0]))
        at += turn + 1
        constraint.accept(int(token))
        if token == eos:
            break
        said.append(int(token))
    return spoken(tokenizer, said), not constraint.is_cut_short


TEXT = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
LABELS = ["positive", "negative", "neutral"]
LABEL = TEXT | {"properties": {"a": {"enum": LABELS}}}


@pytest.mark.parametrize("text", ["\\u00e9\\n\\\\", "\U0001f600", "é", "a,b:{c}"])
def test_texts_end_at_any_limit(compiler, text):
    tokenizer, rules = compiler._tokenizer, rules_of(compiler, TEXT)
    script = tokenizer.encode(text, add_special_tokens=False)
    for room in range(LEAST_ROOM, LEAST_ROOM + 40):
        found, by_itself = say(tokenizer, rules, room, script)
        jsonschema.validate(json.loads(found), TEXT)
        assert not by_itself and len(json.loads(found)["a"]) > 3


@pytest.mark.parametrize("label", LABELS)
def test_the_model_chooses_for_as_long_as_that_fits(compiler, label):
    """A label behind a list that is as long as there is room for."""
    tokenizer, count = compiler._tokenizer, 40
    lists = {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": count}
    bound = TEXT | {"properties": {"l": lists, "a": {"enum": LABELS}}, "required": ["l", "a"]}
    text = json.dumps({"l": [7] * count, "a": label})
    script = tokenizer.encode(text, add_special_tokens=False)
    assert len(script) > LEAST_ROOM
    for spare in range(5):
        found, _ = say(tokenizer, rules_of(compiler, bound), len(script) + spare, script)
        assert json.loads(found) == json.loads(text), spare


@pytest.mark.parametrize("wanted", [{"choice": LABELS}, {"regex": "[0-9]{1,3}|(abc)+"}])
def test_what_has_no_endless_lists_is_the_models_own(compiler, wanted):
    bound = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    assert compiler.compile(bound).result().ends is None


@pytest.mark.parametrize("room", [1, 2, 3, 9, 15, 16, 17, 18, LEAST_ROOM - 1])
def test_short_outputs_are_the_models_own(compiler, room):
    tokenizer, text = compiler._tokenizer, '{"a": "negative"}'
    script = tokenizer.encode(text, add_special_tokens=False)
    found, _ = say(tokenizer, rules_of(compiler, LABEL), room, script)
    assert text.startswith(found) and (found == text) == (room >= len(script))


FORMATS = {
    "date-time": "2024-02-29T12:30:01.25Z",
    "date": "2024-02-29",
    "time": "12:30:01Z",
    "duration": "P3DT4H",
    "email": "joe.doe@mail.example.com",
    "hostname": "a.example.com",
    "ipv4": "10.20.30.40",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/a?b=c",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}
PATTERNS = {
    r"^v?\d+\.\d+\.\d+$": "v10.20.30",
    r"^[A-Z]{2}-\d{4}$": "AB-1234",
    r"^[a-z]+@[a-z]+\.com$": "joe@home.com",
    r"^\d+(px|em)$": "120px",
    r"^#[0-9a-f]{6}$": "#00ff00",
    r"^\+?[0-9 ]+$": "+49 123",
    r"^[A-Za-z ]+, [A-Z]{2}$": "San Jose, CA",
    r"^(GET|POST) /[a-z/]+ HTTP/1.1$": "GET /a/b HTTP/1.1",
    r"^[^@]+@[^@]+\.[^@]+$": "joe@home.com",
    r"^.{40,}$": "x" * 44,
}
BOUND_TEXTS = [({"format": name}, text) for name, text in FORMATS.items()]
BOUND_TEXTS += [({"pattern": pattern}, text) for pattern, text in PATTERNS.items()]


@pytest.mark.parametrize(("bound", "text"), BOUND_TEXTS)
def test_bound_texts_have_ends(compiler, bound, text):
    schema = TEXT | {"properties": {"a": {"type": "string", **bound}}}
    tokenizer, rules = compiler._tokenizer, rules_of(compiler, schema)
    ids, matcher = tokenizer.encode(json.dumps({"a": text}), False), rules.matcher.deep_copy()
    for token in [*ids, None]:
        way = rules.ends.shortest(matcher, 128)
        behind = matcher.deep_copy()
        assert way is not None
        assert not way or (behind.consume_tokens(way) and behind.is_accepting())
        assert token is None or matcher.consume_token(token)


def test_from_anywhere_the_end_is_valid(compiler, tiny_model):
    tokenizer = tokenizer_from_folder(tiny_model)
    rules = rules_of(compiler, MEAL)
    start = rules.matcher
    ids = tokenizer.encode(FULL, add_special_tokens=False)
    for said in range(len(ids) + 1):
        matcher = start.deep_copy()
        assert not said or matcher.consume_tokens(ids[:said])
        way = rules.ends.shortest(matcher, 128)
        assert way is not None, FULL[:said]
        assert rules.ends.shortest(matcher, len(way)) == way  # it is left as it was
        assert not way or rules.ends.shortest(matcher, len(way) - 1) is None
        text = b"".join(tokenizer.token_bytes(i) for i in ids[:said] + way).decode()
        jsonschema.validate(json.loads(text), MEAL)
        assert not way or matcher.consume_tokens(way)
        assert matcher.is_accepting()


OTHERS = ['start: ("ab")+', 'start: "a" start "b" | "c"']


@pytest.mark.parametrize("grammar", OTHERS)
def test_other_grammars(compiler, grammar):
    bound = SamplingParams(structured_outputs=StructuredOutputs(grammar=grammar))
    rules = compiler.compile(bound).result()
    matcher = rules.matcher.deep_copy()
    assert matcher.consume_tokens(compiler._tokenizer.encode("a", add_special_tokens=False))
    way = rules.ends.shortest(matcher, 128)
    assert way and matcher.consume_tokens(way) and matcher.is_accepting()


def test_what_has_no_short_end_is_left_alone(compiler):
    rules = rules_of(compiler, {"type": "string", "minLength": 1000})
    assert rules.ends.shortest(rules.matcher, 1000) is None
    script = compiler._tokenizer.encode("abc", add_special_tokens=False)
    found, by_itself = say(compiler._tokenizer, rules, LEAST_ROOM, script)
    assert len(found) == LEAST_ROOM and found.strip('"') in "abc" * LEAST_ROOM and by_itself


def params(schema, **options) -> SamplingParams:
    wanted = StructuredOutputs(json=schema)
    return SamplingParams(structured_outputs=wanted, **{"max_tokens": 160, **options})


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"n": 4, "seed": 2}, {"logprobs": 1}])
def test_a_random_model_ends_in_time(tiny_model, name, options):
    with LLM(str(tiny_model), **SIZES) as llm:
        for choice in llm.generate(PROMPT, params(ENDLESS[name], **options))[0].outputs:
            jsonschema.validate(json.loads(choice.text), ENDLESS[name])
            assert choice.finish_reason == "stop" or 100 < len(choice.token_ids) <= 160
        assert_idle(llm)


def test_the_end_of_the_context_is_one_too(tiny_model):
    with LLM(str(tiny_model), **SIZES) as llm:
        output = llm.generate(PROMPT, params(ENDLESS["text"], max_tokens=None, temperature=0))[0]
        choice = output.outputs[0]
        jsonschema.validate(json.loads(choice.text), ENDLESS["text"])
        assert choice.finish_reason == "length" and len(choice.token_ids) <= 256 - len(PROMPT)


@pytest.mark.parametrize("seed", range(4))
def test_what_ends_by_itself_is_let(tiny_model, seed):
    few = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    bound = {"type": "object", "properties": {"a": few, "b": few}, "required": ["a", "b"]}
    bound["additionalProperties"] = False
    with LLM(str(tiny_model), **SIZES) as llm:
        ample = llm.generate(PROMPT, params(bound, max_tokens=200, seed=seed))[0].outputs[0]
        assert ample.finish_reason == "stop"
        tight = params(bound, max_tokens=max(LEAST_ROOM, len(ample.token_ids)), seed=seed)
        assert llm.generate(PROMPT, tight)[0].outputs[0].token_ids == ample.token_ids


def test_too_few_tokens_are_the_models_own(tiny_model):
    """An end of more than half of them is not worth what the model would say."""
    with LLM(str(tiny_model), **SIZES) as llm:
        short = llm.generate(PROMPT, params(MEAL, max_tokens=40, temperature=0))[0].outputs[0]
        long = llm.generate(PROMPT, params(MEAL, max_tokens=200, temperature=0))[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 40
    assert long.token_ids[:40] == short.token_ids
    jsonschema.validate(json.loads(long.text), MEAL)
