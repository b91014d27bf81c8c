"""Tools and reasoning over HTTP, with an engine that says what the test tells it to."""

from __future__ import annotations

import json

import jsonschema
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from llmjax_serving.openapi import REQUESTS

from .double import ByteTokenizer, EngineDouble, client_of, run_async
from .test_chat import USER, post, stream

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]
SAID = (
    "<think>\nWhich city?\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Nîmes"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
QWEN = "<tool_call> arguments </think>"
PYTHONIC, GPT_OSS = "[func_name1(params_name1=1)]", "<|channel|> <|message|>"
CALLS = [("weather", {"city": "Nîmes"}), ("now", {})]


def engine(*says: str, template: str = QWEN) -> EngineDouble:
    tokenizer = ByteTokenizer()
    tokenizer.tool_template = template
    return EngineDouble(says=list(says), tokenizer=tokenizer)


def calls(message) -> list[tuple[str, dict]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


@run_async
async def test_a_message_has_its_parts():
    double = engine(SAID)
    async with client_of(double) as client:
        _, body = await post(client, tools=TOOLS, n=2)
    assert b"'name': 'weather'" in bytes(double.seen[0][0])
    for choice in ChatCompletion.model_validate(body, strict=True).choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.reasoning_content == choice.message.reasoning == "Which city?"
        assert calls(choice.message) == CALLS
        assert all(call.id.startswith("call_") for call in choice.message.tool_calls)


@run_async
async def test_a_stream_is_the_same_in_whatever_pieces():
    for size in (1, 3, 7, len(SAID)):
        double = engine(*(SAID[i : i + size] for i in range(0, len(SAID), size)))
        async with client_of(double) as client:
            chunks = await stream(client, tools=TOOLS)
        state, reasoning = ChatCompletionStreamState(), ""
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
            delta = chunk["choices"][0]["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning += delta.get("reasoning", "")
        choice = state.get_final_completion().choices[0]
        assert (reasoning, choice.message.content) == ("Which city?", "Let me look.")
        assert calls(choice.message) == CALLS
        assert choice.finish_reason == "tool_calls"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        pieces = [c for delta in deltas for c in delta.get("tool_calls", [])]
        assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1]
        assert sorted(pieces, key=lambda piece: piece["index"]) == pieces
        assert all({*piece} == {"index", "function"} for piece in pieces if "id" not in piece)
        assert len(pieces) > 2 or size == len(SAID)


@run_async
async def test_only_a_call_has_no_content():
    async with client_of(engine(*SAID[SAID.index("<tool_call>") :])) as client:
        _, body = await post(client, tools=TOOLS, parallel_tool_calls=False)
        _, cut = await post(client, tools=TOOLS, max_tokens=30)
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    choice = cut["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("<tool_call>")


@run_async
async def test_a_call_that_is_cut_off_is_one():
    said = SAID[SAID.index("<tool_call>") :]
    most = said.index("îmes")
    async with client_of(engine(*said)) as client:
        _, body = await post(client, tools=TOOLS, max_tokens=most)
        chunks = await stream(client, tools=TOOLS, max_tokens=most)
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert call["function"] == {"name": "weather", "arguments": '{"city": "N'}
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    snapshot = state.current_completion_snapshot.choices[0]
    assert snapshot.message.tool_calls[0].function.arguments == '{"city": "N'
    assert snapshot.finish_reason == "length"
    # What goes wrong by itself is not said to be a call that can be made.
    async with client_of(engine(said[:most])) as client:
        _, body = await post(client, tools=TOOLS)
    assert body["choices"][0]["finish_reason"] == "stop"


@run_async
async def test_without_tools_nothing_is_taken_for_a_call():
    double = engine(SAID)
    async with client_of(double) as client:
        _, body = await post(client, tools=TOOLS, tool_choice="none", include_reasoning=False)
    assert b"weather" not in bytes(double.seen[0][0])
    choice = body["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": SAID[SAID.index("Let") :],
        "refusal": None,
    }


@run_async
async def test_reasoning_that_is_not_wanted_is_not_sent():
    double = engine(*SAID)
    async with client_of(double) as client:
        chunks = await stream(client, tools=TOOLS, include_reasoning=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in deltas)
    assert all(
        chunk["choices"][0]["finish_reason"] or delta
        for delta, chunk in zip(deltas, chunks, strict=True)
    )


@run_async
async def test_who_must_call_is_bound_to_it():
    double = engine('[{"name": "now", "arguments": {}}]', template="nothing known")
    named = {"type": "function", "function": {"name": "now"}}
    async with client_of(double) as client:
        status, body = await post(client, tools=TOOLS, tool_choice="required")
        await post(client, tools=TOOLS, tool_choice=named)
    assert status == 200
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    any_tool, one = (params.structured_outputs.grammar for _, params in double.seen)
    assert "weather" in any_tool and "weather" not in one and "now" in one
    assert all(b"weather" in bytes(ids) for ids, _ in double.seen)


@pytest.mark.parametrize(
    ("template", "fields", "param", "message"),
    [
        ("unknown", {}, "tool_choice", "--tool-call-parser"),
        (QWEN, {"tool_choice": "some"}, "tool_choice", "allowed"),
        (PYTHONIC, {"response_format": {"type": "json_object"}}, "response_format", "tools"),
        (PYTHONIC, {"structured_outputs": {"regex": "a"}}, "structured_outputs", "tools"),
        (GPT_OSS, {"response_format": {"type": "json_object"}}, "response_format", "tools"),
        (GPT_OSS, {"tool_choice": "required"}, "tools", "gpt_oss"),
        (QWEN, {"use_beam_search": True}, "tools", "beam"),
        (QWEN, {"reasoning_effort": "low"}, "reasoning_effort", "chat template"),
    ],
)
def test_refusals_name_the_field(template, fields, param, message):
    @run_async
    async def test():
        double = engine("a", template=template)
        async with client_of(double) as client:
            status, body = await post(client, tools=TOOLS, **fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert message in body["error"]["message"]
        assert not double.seen

    test()


@run_async
async def test_a_schema_that_cannot_be_kept_to_is_named():
    wrong = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": wrong}}]
    async with client_of(engine("a")) as client:
        for function in ({"strict": True}, {}):
            tools[1]["function"] |= function
            choice = "auto" if function else "required"
            status, body = await post(client, tools=tools, tool_choice=choice)
            assert (status, body["error"]["param"]) == (400, "tools[1].function.parameters")
        tools[1]["function"]["strict"] = False
        assert (await post(client, tools=tools))[0] == 200


@run_async
async def test_an_answer_is_of_its_format_or_a_call():
    double = engine('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    asked = {"tools": TOOLS, "response_format": {"type": "json_object"}}
    async with client_of(double) as client:
        _, body = await post(client, **asked)
        await post(client, **asked, tool_choice="required")
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    either, call = (params.structured_outputs for _, params in double.seen)
    assert either.json_object and either.or_calls == call.grammar and not call.json_object


@run_async
async def test_templates_are_told_how_long_to_think():
    double = engine("a", template="{{ reasoning_effort }}{{ enable_thinking }}")
    async with client_of(double) as client:
        await post(client, reasoning_effort="low")
        double.tokenizer.tool_template = "{{ enable_thinking }}"
        await post(client, reasoning_effort="none")
        await post(client, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    prompts = [bytes(ids).decode() for ids, _ in double.seen]
    assert "reasoning_effort=low" in prompts[0]
    assert "enable_thinking=False" in prompts[1] and "enable_thinking=True" in prompts[2]


@run_async
async def test_who_thinks_may_be_bounded():
    double = engine("<think>Hm.</think>4", template="</think> {{ thinking }}")
    async with client_of(double) as client:
        status, body = await post(client, thinking_token_budget=5)
        assert status == 200 and body["choices"][0]["message"]["reasoning"] == "Hm."
        await post(client, reasoning_effort="none")
        double.tokenizer.tool_template = "</think>"
        await post(client, reasoning_effort="none")
        await post(client, reasoning_effort="none", thinking_token_budget=9)
        beam = {"use_beam_search": True, "n": 2, "temperature": 0}
        for fields in ({"thinking_token_budget": 0}, {"reasoning_effort": "none"}):
            status, body = await post(client, **beam, **fields)
            assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
        double.tokenizer.tool_template = "no tags"
        await post(client, reasoning_effort="none")
        status, body = await post(client, thinking_token_budget=5)
        assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
        assert "--reasoning-parser" in body["error"]["message"]
    asked = [(p.thinking_token_budget, p.reasoning) for _, p in double.seen]
    assert asked[0] == (5, ("<think>", "</think>", False))
    # Turned off by the template's own switch, or by a budget of nothing, where it thinks at all.
    assert b"thinking=False" in bytes(double.seen[1][0])
    assert [budget for budget, _ in asked[1:]] == [None, 0, 9, None]


@run_async
async def test_structured_output_comes_after_the_reasoning():
    double = engine("<think>Hm.</think>{}")
    async with client_of(double) as client:
        _, body = await post(client, response_format={"type": "json_object"})
        said = {"role": "assistant", "content": "<think>Hm.</think>{"}
        going_on = {"add_generation_prompt": False, "continue_final_message": True}
        await post(
            client, messages=[USER, said], response_format={"type": "json_object"}, **going_on
        )
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("{}", "Hm.")
    first, second = (params.structured_outputs.after for _, params in double.seen)
    assert (*first,) == ("<think>", "</think>", False) and second is None


def test_the_description_of_the_api_knows_tools():
    checker = jsonschema.Draft202012Validator(REQUESTS["ChatRequest"])
    named = {"type": "function", "function": {"name": "now"}}
    asked = {"messages": [USER], "tools": TOOLS, "tool_choice": named, "reasoning_effort": "low"}
    checker.validate(asked)
    for wrong in (
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tool_choice": "any"},
        {"reasoning_effort": "much"},
    ):
        assert not checker.is_valid(asked | wrong)


@run_async
async def test_a_conversation_goes_on_with_what_tools_said():
    double = engine("Warm.")
    async with client_of(double) as client:
        called = {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    # What OpenAI's client has parsed comes back with it.
                    "function": {"name": "now", "arguments": "{}", "parsed_arguments": {}},
                }
            ],
            "parsed": None,
        }
        told = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
        status, _ = await post(client, messages=[USER, called, told], tools=TOOLS)
        counted = await client.post("/tokenize", json={"messages": [USER], "tools": TOOLS})
        tokens = (await counted.json())["tokens"]
    assert status == 200
    assert b"weather" in bytes(tokens)
