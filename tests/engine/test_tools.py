"""A model that talks nonsense makes calls that keep to their schemas, where it must."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputs
from llmjax.answers import ChatFormat, ToolUse, plan_answer, read_tools
from llmjax.answers.grammar import calls_grammar, strict_grammar
from llmjax.answers.syntaxes import SYNTAXES
from llmjax.errors import InvalidRequestError, StructuredOutputError
from llmjax.message import ChatMessage
from llmjax.structured import GrammarCompiler
from llmjax.structured_outputs import Reasoning
from llmjax.tokenizer import IncrementalDetokenizer, Tokenizer

from .said import assert_idle
from .test_structured_outputs import SIZES

USER = [{"role": "user", "content": "hi"}]
SCHEMAS = {
    "paint": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "::= blue"]}, "coats": {"type": "integer"}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMAS["paint"]}},
    {"type": "function", "function": {"name": "stop"}},
]
PARAMS = SamplingParams(temperature=1.0, max_tokens=200, seed=3)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), **SIZES) as llm:
        yield llm


def check(calls, names=SCHEMAS):
    for call in calls:
        assert call.name in names
        if not call.ends:
            continue  # max_tokens
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("parser", [None, "hermes", "llama3_json", "deepseek_v3"])
def test_whoever_must_call_does(llm, monkeypatch, parser):
    config = replace(llm.engine.config.model, tool_call_parser=parser)
    monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, model=config))
    named = {"type": "function", "function": {"name": "stop"}}
    params = replace(PARAMS, n=2)
    several, one = (
        llm.chat(USER, params, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        for parallel in (True, False)
    )
    for choice in several[0].outputs + one[0].outputs:
        if choice.finish_reason != "length":
            assert choice.finish_reason == "tool_calls", choice.text
            assert choice.message.content == "" and choice.message.tool_calls
        check(choice.message.tool_calls)
    assert any(choice.finish_reason == "tool_calls" for choice in one[0].outputs)
    assert all(len(choice.message.tool_calls) <= 1 for choice in one[0].outputs)
    (output,) = llm.chat(USER, PARAMS, tools=TOOLS, tool_choice=named)
    assert [c.name for c in output.outputs[0].message.tool_calls] == ["stop"]
    assert_idle(llm)


def test_streamed_and_whole_are_one(llm):
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = llm.chat(USER, PARAMS, **asked)
    choices = [output.outputs[0] for output in llm.stream(USER, PARAMS, **asked)]
    assert "".join(choice.text for choice in choices) == whole.outputs[0].text
    assert sum(len(choice.message.tool_calls) for choice in choices) > 1  # as it is written
    message = ChatMessage()
    for choice in choices:
        message.add(choice.message)
    (call,) = message.tool_calls
    (expected,) = whole.outputs[0].message.tool_calls
    assert (call.name, call.arguments) == (expected.name, expected.arguments)
    assert choices[-1].finish_reason == whole.outputs[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_with_the_message(llm):
    (output,) = llm.chat(USER, PARAMS, tools=TOOLS, tool_choice="required")
    again = [*USER, output.outputs[0].message.as_dict(), {"role": "user", "content": "more"}]
    assert llm.chat(again, replace(PARAMS, max_tokens=1))[0].finished


def test_refusals(llm):
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}]
    cases = [
        ({"tools": TOOLS}, "tool_choice"),
        ({"tools": wrong, "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [3]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
    ]
    for asked, param in cases:
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat(USER, PARAMS, **asked)
        assert caught.value.param == param
    with pytest.raises(InvalidRequestError, match="messages only"):
        llm.stream("a prompt", PARAMS, tools=TOOLS)
    assert_idle(llm)


def test_bound_after_reasoning(llm, monkeypatch):
    config = replace(llm.engine.config.model, reasoning_parser="qwen3")
    monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, model=config))
    (less,) = llm.tokenizer.encode("<", add_special_tokens=False)
    params = replace(PARAMS, structured_outputs=StructuredOutputs(json=SCHEMAS["paint"]))
    thinks, answers = (
        llm.chat(USER, replace(params, logit_bias={less: bias}))[0].outputs[0].message
        for bias in (100.0, -100.0)
    )
    assert thinks.content == "" and set(thinks.reasoning) == {"<"}
    jsonschema.validate(json.loads(answers.content), SCHEMAS["paint"])
    assert answers.reasoning == ""


MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizers(llm) -> list[Tokenizer]:
    """One that spells the markers, and one of which they are special tokens."""
    plain = llm.tokenizer
    backend = type(plain.backend).from_str(plain.backend.to_str())
    backend.add_special_tokens(list(MARKERS))
    return [plain, Tokenizer(backend, eos_token_ids=plain.eos_token_ids)]


def accepted(tokenizer: Tokenizer, wanted: StructuredOutputs, text: str) -> bool:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    params = SamplingParams(structured_outputs=wanted)
    constraint = compiler.compile(params).result().start(4096)
    ids = tokenizer.encode(text, add_special_tokens=False)
    try:
        for token in (*ids, min(tokenizer.eos_token_ids)):
            constraint.accept(token)
    except StructuredOutputError:
        return False
    finally:
        compiler.close()
    return True


def required(name: str, tokenizer: Tokenizer) -> StructuredOutputs:
    use = ToolUse.of(read_tools(TOOLS), "required")
    return calls_grammar(SYNTAXES[name].frame, use, tokenizer.special_tokens)


def strict(name: str, tokenizer: Tokenizer) -> StructuredOutputs:
    """Of the two functions the first is."""
    tools = [{**TOOLS[0], "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    syntax, use = SYNTAXES[name], ToolUse.of(read_tools(tools), "auto")
    return strict_grammar(syntax.frame, syntax.markers[0], use, tokenizer.special_tokens)


def answer_after(name: str, tokenizer: Tokenizer) -> StructuredOutputs:
    wanted = StructuredOutputs(choice=["yes", "no"])
    return replace(wanted, after=Reasoning("<think>", "</think>", name == "open"))


def either(name: str, tokenizer: Tokenizer) -> StructuredOutputs:
    calls = required(name, tokenizer).grammar
    return replace(answer_after("", tokenizer), or_calls=calls)


GOOD, BAD = '{"colour": "::= blue", "coats": 2}', '{"colour": "red"}'
HERMES = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "stop", "arguments": {}}, {"name": "paint", "arguments": %s}]'
ARGS = "[TOOL_CALLS]%s[ARGS]%s"
ACCEPTED = [
    (required, "hermes", HERMES % ("paint", GOOD), True),
    (required, "hermes", HERMES % ("stop", "{}") + "\n" + HERMES % ("paint", GOOD), True),
    (required, "hermes", HERMES % ("paint", BAD), False),
    (required, "hermes", HERMES % ("go", "{}"), False),
    (required, "hermes", "no call", False),
    (required, "mistral", MISTRAL % GOOD, True),
    (required, "mistral", MISTRAL % BAD, False),
    (required, "mistral_args", ARGS % ("stop", "{}") + ARGS % ("paint", GOOD), True),
    (required, "mistral_args", ARGS % ("stop", "{}") + ARGS % ("paint", BAD), False),
    (required, "json", f'[{{"name": "paint", "arguments": {GOOD}}}]', True),
    (required, "json", "[]", False),
    (strict, "hermes", "Text: {}.", True),
    (strict, "hermes", f"Ok. {HERMES % ('paint', GOOD)} Then {HERMES % ('stop', '{}')}.", True),
    (strict, "hermes", HERMES % ("stop", '{"more": 1}'), True),
    (strict, "hermes", f"Ok. {HERMES % ('paint', BAD)}", False),
    (strict, "mistral_args", "Ok." + ARGS % ("paint", GOOD), True),
    (strict, "mistral_args", "Ok." + ARGS % ("paint", BAD), False),
    (answer_after, "open", "Yes < no.</think>\n\nyes", True),
    (answer_after, "open", "yes", False),
    (answer_after, "", "yes", True),
    (answer_after, "", "<think>Hm.</think>no", True),
    (answer_after, "", "<think>Hm.no", False),
    (answer_after, "", "Hm.</think>no", False),
    (either, "hermes", "<think>Hm.</think>yes", True),
    (either, "hermes", f"<think>Hm.</think>{HERMES % ('paint', GOOD)}", True),
    (either, "hermes", f"<think>Hm.</think>{HERMES % ('paint', BAD)}", False),
    (either, "mistral_args", ARGS % ("stop", "{}"), True),
    (either, "mistral_args", "maybe", False),
]


@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize(("grammar", "name", "text", "expected"), ACCEPTED)
def test_what_grammars_accept(tokenizers, are_special, grammar, name, text, expected):
    tokenizer = tokenizers[are_special]
    assert (tokenizer.encode("<think>", False)[0] in tokenizer.special_ids) == are_special
    assert accepted(tokenizer, grammar(name, tokenizer), text) == expected


def test_special_tokens_of_a_syntax_are_text(tokenizers):
    """And no others are."""
    tokenizer = tokenizers[True]
    ids = tokenizer.encode("<think>a</think></s>[TOOL_CALLS]stop[ARGS]{}", False)
    for name in ("mistral", None):
        form = ChatFormat.of(name, "qwen3", None)
        use = ToolUse.of(read_tools(TOOLS), "auto") if name else None
        params, plan = plan_answer(form, use, PARAMS, tokenizer, [5])
        kept = params.kept_special_ids
        detokenizer = IncrementalDetokenizer(tokenizer, [5], kept_ids=kept)
        message = plan.parser().push(detokenizer.push(ids), ids, ended=True)
        assert message.reasoning == "a"
        assert [call.name for call in message.tool_calls] == (["stop"] if name else [])
        assert message.content == ("" if name else "stop{}")
