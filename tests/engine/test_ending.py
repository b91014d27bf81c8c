"""A bound output comes to its end before its tokens are used up."""

from __future__ import annotations

import json

import jsonschema
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputs
from llmjax.structured import GrammarCompiler
from llmjax.tokenizer import tokenizer_from_folder

from .said import assert_idle

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


def test_from_anywhere_the_end_is_valid(compiler, tiny_model):
    tokenizer = tokenizer_from_folder(tiny_model)
    rules = rules_of(compiler, MEAL)
    start = rules.matcher
    ids = tokenizer.encode(FULL, add_special_tokens=False)
    for said in range(len(ids) + 1):
        matcher = start.deep_copy()
        assert not said or matcher.consume_tokens(ids[:said])
        way = rules.endings.find(matcher, 128)
        assert way is not None, FULL[:said]
        assert rules.endings.find(matcher, len(way)) == way  # it is left as it was
        assert not way or rules.endings.find(matcher, len(way) - 1) is None
        text = b"".join(tokenizer.token_bytes(i) for i in ids[:said] + way).decode()
        jsonschema.validate(json.loads(text), MEAL)
        assert not way or matcher.consume_tokens(way)
        assert matcher.is_accepting()


OTHERS = [{"regex": "(ab)+"}, {"grammar": 'start: "a" start "b" | "c"'}]


@pytest.mark.parametrize("wanted", OTHERS)
def test_other_grammars(compiler, wanted):
    bound = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    rules = compiler.compile(bound).result()
    matcher = rules.matcher.deep_copy()
    assert matcher.consume_tokens(compiler._tokenizer.encode("a", add_special_tokens=False))
    way = rules.endings.find(matcher, 128)
    assert way and matcher.consume_tokens(way) and matcher.is_accepting()


def test_what_has_no_short_end_is_left_alone(compiler):
    rules = rules_of(compiler, {"type": "string", "minLength": 1000})
    assert rules.endings.find(rules.matcher, 1000) is None
    constraint = rules.start(40)
    assert not constraint.is_cut_short and constraint.forced != []  # the quotation mark


SIZES = {
    "block_size": 4,
    "max_num_seqs": 8,
    "token_buckets": (32,),
    "seq_buckets": (8,),
    "prefill_chunk_size": 16,
    "max_model_len": 256,
    "num_gpu_blocks_override": 600,
    "background": False,
}
PROMPT = list(range(60, 90))


def params(schema, **options) -> SamplingParams:
    wanted = StructuredOutputs(json=schema)
    return SamplingParams(structured_outputs=wanted, **{"max_tokens": 120, **options})


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"n": 4, "seed": 2}, {"logprobs": 1}])
def test_a_random_model_ends_in_time(tiny_model, name, options):
    with LLM(str(tiny_model), **SIZES) as llm:
        for choice in llm.generate(PROMPT, params(ENDLESS[name], **options))[0].outputs:
            jsonschema.validate(json.loads(choice.text), ENDLESS[name])
            assert choice.finish_reason == "stop" or 60 < len(choice.token_ids) <= 120
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
        tight = params(bound, max_tokens=len(ample.token_ids) + 24, seed=seed)
        assert llm.generate(PROMPT, tight)[0].outputs[0].token_ids == ample.token_ids


def test_too_few_tokens_are_the_models_own(tiny_model):
    """An end of more than half of them is not worth what the model would say."""
    with LLM(str(tiny_model), **SIZES) as llm:
        short = llm.generate(PROMPT, params(MEAL, max_tokens=20, temperature=0))[0].outputs[0]
        long = llm.generate(PROMPT, params(MEAL, max_tokens=200, temperature=0))[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 20
    assert long.token_ids[:20] == short.token_ids
    jsonschema.validate(json.loads(long.text), MEAL)
