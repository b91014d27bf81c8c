"""A model that talks nonsense says what it is told to, by schema, regex and grammar."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputs
from llmjax.errors import InvalidRequestError, StructuredOutputError

from .said import assert_idle

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CASES = {
    "json": StructuredOutputs(json=PERSON),
    "json as text": StructuredOutputs(json=json.dumps(PERSON), disable_any_whitespace=True),
    "regex": StructuredOutputs(regex=r"\d{3}-[a-f]{2}(x|yy)"),
    "choice": StructuredOutputs(choice=["yes", "no", 'a "quoted" one']),
    "lark": StructuredOutputs(grammar='start: "1" ("+" "1"){0,3} "."'),
    "gbnf": StructuredOutputs(grammar='root ::= "go " ("left" | "right")'),
}
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


def is_right(name: str, text: str) -> bool:
    if name.startswith("json"):
        jsonschema.validate(json.loads(text), PERSON)
        return not re.search(r"\s{9}", text) and (name == "json" or not re.search(r"\s", text))
    patterns = {
        "regex": r"[0-9]{3}-[a-f]{2}(x|yy)",
        "choice": r'yes|no|a "quoted" one',
        "lark": r"1(\+1){0,3}\.",
        "gbnf": r"go (left|right)",
    }
    return re.fullmatch(patterns[name], text) is not None


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), **SIZES) as llm:
        yield llm


TAG = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}


def chained(count: int, link) -> dict:
    """A schema whose definitions refer each to the next."""
    parts = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{count}": {"type": "null"}}}


def params(name: str, **options) -> SamplingParams:
    options = {"temperature": 1.0, "max_tokens": 200, "seed": 1, **options}
    return SamplingParams(structured_outputs=CASES[name], **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0, 2.0])
def test_outputs_are_what_they_must_be(llm, name, temperature):
    given = params(name, temperature=temperature, n=3 if temperature else 1)
    for choice in llm.generate(PROMPT, given)[0].outputs:
        assert choice.finish_reason == "stop", choice.text
        assert is_right(name, choice.text), choice.text
    assert_idle(llm)


def test_whoever_else_is_there(llm, tiny_model):
    """Alone, in a crowd, chunked, and preempted in a small pool: the same tokens."""
    given = [params(name, n=2, seed=5) for name in CASES] + [
        SamplingParams(temperature=1.0, seed=9, max_tokens=40, ignore_eos=True)
    ] * 3
    alone = [llm.generate(PROMPT, one)[0] for one in given]
    small = {"num_gpu_blocks_override": 64, "forecast_margin": None, "prefill_chunk_size": 8}
    with LLM(str(tiny_model), **{**SIZES, **small}) as cramped:
        crowd = cramped.generate([PROMPT] * len(given), given)
        assert cramped.engine.scheduler.num_preemptions > 0
        assert_idle(cramped)
    for one, other in zip(alone, crowd, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert [c.text for c in one.outputs] == [c.text for c in other.outputs]


def test_streams_stops_logprobs_and_limits(llm):
    whole = llm.generate(PROMPT, params("json"))[0].outputs[0]
    parts = [output.outputs[0] for output in llm.stream(PROMPT, params("json", logprobs=2))]
    assert "".join(part.text for part in parts) == whole.text
    assert sum(len(part.logprobs) for part in parts) == len(whole.token_ids)
    assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["stop"]
    cut = llm.generate(PROMPT, params("json", stop=['"age"']))[0].outputs[0]
    assert cut.text == whole.text.split('"age"')[0] and cut.stop_reason == '"age"'
    short = llm.generate(PROMPT, params("json", max_tokens=5))[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 5
    # End-of-sequence tokens have no say where the grammar has ended.
    for options in ({"ignore_eos": True}, {"min_tokens": 100}):
        text = llm.generate(PROMPT, params("regex", **options))[0].outputs[0].text
        assert is_right("regex", text)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "["}, "regex: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"grammar": 'start: "a"\nstart: "b"'}, "grammar: .*duplicate rule"),
        ({"grammar": "start: nowhere"}, "grammar: .*nowhere"),
        ({"grammar": "root ::= ("}, "grammar: it is no GBNF"),
        ({"json": "{"}, "json: it is no JSON"),
        ({"json": "3"}, "json: allowed is a JSON schema"),
        ({"json": {"type": "nothing"}}, "json: "),
        ({"json": {"$ref": "#/nowhere"}}, "json: "),
        ({"json": {"maximum": float("inf")}}, "json: it is no JSON"),
        ({"json": {"maximum": 10**400}}, "json: it is no JSON"),
        ({"json": '{"maximum": NaN}'}, "json: it is no JSON"),
        ({"json": '{"enum": ["\\ud800"]}'}, "json: it is no JSON"),
        ({"structural_tag": {"structures": []}}, "structural_tag: "),
        ({"structural_tag": {"structures": [TAG], "triggers": [5]}}, "structural_tag: allowed"),
        ({"structural_tag": {"structures": [5], "triggers": ["<"]}}, "structural_tag: a structure"),
        *(
            (
                {"structural_tag": {"structures": [TAG | wrong], "triggers": ["<"]}},
                "structural_tag: begin and end",
            )
            for wrong in ({"begin": 5}, {"end": None}, {"schema": [{"$id": "a"}]}, {"schema": True})
        ),
        # What is too deep for the compiler's stack, or takes it for ever.
        ({"json": chained(1000, lambda ref: {"properties": {"x": ref}})}, "json: .*too deeply"),
        ({"json": chained(1000, lambda ref: {"items": ref})}, "json: .*too deeply"),
        ({"json": chained(20_000, lambda ref: ref)}, "json: .*too deeply"),
        (
            {
                "grammar": "start: a0\n"
                + "".join(f"a{i}: a{i + 1}\n" for i in range(5000))
                + 'a5000: "x"'
            },
            "grammar: .*too deeply",
        ),
        ({"grammar": "root ::= " + "(" * 10_000}, "grammar: it is no GBNF"),
        # What nothing matches, not even an empty text.
        ({"grammar": "start: start"}, "grammar: "),
        ({"regex": r"[^\s\S]"}, "regex: "),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_else_is_hurt(llm, wanted, message):
    wrong = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
    for _ in range(2):  # what failed once is not taken for compiled
        with pytest.raises(InvalidRequestError, match=f"(?s){message}"):
            llm.generate(PROMPT, wrong)
    assert is_right("choice", llm.generate(PROMPT, params("choice"))[0].outputs[0].text)
    assert_idle(llm)


@pytest.mark.parametrize(
    "wanted", [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"regex": 5}]
)
def test_exactly_one_kind_is_asked_for(wanted):
    with pytest.raises(InvalidRequestError, match="allowed"):
        StructuredOutputs(**wanted)


@pytest.mark.parametrize("kind", ["choice", "json", "regex"])
def test_a_special_token_that_must_be_said_is_text(llm, kind):
    tokenizer = llm.tokenizer
    special = next(t for i in tokenizer.special_ids if len(t := tokenizer.token_text(i)) > 2)
    said = f"a {special} b"
    wanted = {"choice": [said], "json": {"const": said}, "regex": re.escape(said)}[kind]
    bound = StructuredOutputs(**{kind: wanted})
    given = SamplingParams(structured_outputs=bound, max_tokens=64, temperature=0)
    [choice] = llm.generate(PROMPT, given)[0].outputs
    assert choice.text == (json.dumps(said) if kind == "json" else said)
    assert not tokenizer.special_ids & set(choice.token_ids[:-1])


def test_choices_may_be_many(llm):
    texts = [f"choice {i}" for i in range(5000)]
    bound = StructuredOutputs(choice=texts)
    given = SamplingParams(structured_outputs=bound, max_tokens=32, temperature=2.0, n=4, seed=3)
    outputs = llm.generate(PROMPT, given)[0].outputs
    assert {choice.finish_reason for choice in outputs} == {"stop"}
    assert {choice.text for choice in outputs} <= set(texts)


def test_a_bias_cannot_lead_out_of_a_grammar(llm):
    banned = {token: -100.0 for token in range(3, 300) if token < 259}
    stuck = params("choice", temperature=0, logit_bias=banned)
    assert is_right("choice", llm.generate(PROMPT, stuck)[0].outputs[0].text)


def test_tags_within_free_text(llm):
    wanted = StructuredOutputs(structural_tag={"structures": [TAG], "triggers": ["<f"]})
    prompt = llm.tokenizer.encode("<f>1</f> <f>22</f> ")
    favour = dict.fromkeys(llm.tokenizer.encode("<f"), 100.0)
    given = SamplingParams(
        structured_outputs=wanted, temperature=1.0, seed=3, max_tokens=60, logit_bias=favour
    )
    text = llm.generate(prompt, given)[0].outputs[0].text
    begun = re.findall(r"<f>(.{0,8})", text)
    assert begun and all(re.match(r"-?[0-9]", rest) for rest in begun if rest)


def test_what_is_forced_takes_no_steps_and_changes_no_token(llm):
    words = "the only thing that may be said here is this one long sentence, and then"
    wanted = StructuredOutputs(regex=f"[ab]{words} (yes|no)")
    said = {}
    for logprobs in (None, 1):
        before = llm.engine.num_steps
        given = SamplingParams(
            structured_outputs=wanted, temperature=1.0, seed=4, max_tokens=200, logprobs=logprobs
        )
        (choice,) = llm.generate(PROMPT, given)[0].outputs
        assert re.fullmatch(f"[ab]{words} (yes|no)", choice.text)
        said[logprobs] = choice.token_ids, llm.engine.num_steps - before
    assert said[None][0] == said[1][0]
    assert said[None][1] < 12 and said[1][1] >= len(words)
    assert_idle(llm)


@pytest.mark.parametrize("temperature", [0, 2.0])
def test_only_what_is_allowed_and_nothing_bad(llm, temperature):
    allowed = llm.tokenizer.encode("abcd ", add_special_tokens=False)
    free = SamplingParams(
        temperature=temperature, seed=8, max_tokens=100, ignore_eos=True, allowed_token_ids=allowed
    )
    text = llm.generate(PROMPT, free)[0].outputs[0].text
    assert len(text) == 100 and set(text) == set("abcd ") if temperature else set("abcd ")
    clean = replace(free, bad_words=["a", "bc", "dd"])
    text = llm.generate(PROMPT, clean)[0].outputs[0].text
    assert len(text) == 100
    assert not re.search("a|bc|dd", text), text
    with_grammar = replace(free, structured_outputs=StructuredOutputs(regex="([a-z] ){5}"))
    text = llm.generate(PROMPT, with_grammar)[0].outputs[0].text
    assert re.fullmatch("([a-d] ){5}", text)


def test_where_no_token_is_left_the_request_fails_alone(llm):
    (token,) = llm.tokenizer.encode("x", add_special_tokens=False)
    stuck = SamplingParams(max_tokens=5, allowed_token_ids=[token], bad_words=["xx"])
    fine = SamplingParams(max_tokens=5, seed=2, ignore_eos=True)
    outputs = llm.generate([PROMPT, PROMPT], [stuck, fine])
    assert isinstance(outputs[0].error, StructuredOutputError)
    assert outputs[1].error is None and len(outputs[1].outputs[0].token_ids) == 5
    assert_idle(llm)
    bound = StructuredOutputs(choice=["a", "b"])
    stuck = SamplingParams(max_tokens=5, bad_words=["a", "b"], structured_outputs=bound)
    [output] = llm.generate(PROMPT, stuck)
    assert "together leave no token" in str(output.error)
    with pytest.raises(InvalidRequestError, match="token id 5000 in allowed_token_ids"):
        llm.generate(PROMPT, SamplingParams(allowed_token_ids=[5000]))
