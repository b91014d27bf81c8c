"""/v1/messages over HTTP, and with Anthropic's own client."""

from __future__ import annotations

import json

import pytest

from llmjax_serving.config import ServerConfig
from llmjax_serving.schema.messages import parse_messages
from llmjax_serving.schema.sampling import Limits

from .double import EngineDouble, client_of, run_async
from .test_tools import SAID, engine

URL = "/v1/messages"
USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "weather", "input_schema": CITY},
    {"name": "now", "description": "the time", "input_schema": {"type": "object"}},
]


async def post(client, url=URL, **body):
    body = {"model": "double", "messages": [USER]} | body
    if url == URL:
        body.setdefault("max_tokens", 50)
    response = await client.post(url, json=body)
    return response.status, await response.json()


async def stream(client, **body):
    body = {"model": "double", "messages": [USER], "max_tokens": 500, "stream": True, **body}
    response = await client.post(URL, json=body)
    assert response.status == 200, await response.text()
    blocks = [block.split("\n") for block in (await response.text()).split("\n\n")[:-1]]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in told]
    return told


def whole(told):
    """The message that the events of a stream come to."""
    message, texts = told[0]["message"], {}
    for event in told[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                delta = event["delta"]
                texts[event["index"]] += next(v for k, v in delta.items() if k != "type")
            case "content_block_stop":
                block, text = message["content"][event["index"]], texts[event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text)
                else:
                    block[block["type"]] = text
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert told[-1]["type"] == "message_stop"
    return message


@run_async
async def test_answer_has_anthropics_shape():
    double = EngineDouble()
    async with client_of(double) as client:
        status, body = await post(client, system="Be brief.", stop_sequences=["x"], top_k=3)
        told = await stream(client, system="Be brief.")
    assert status == 200
    assert body.pop("id").startswith("msg-")
    prompt = "<system>Be brief.<user>hi<assistant>"
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "double",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt) - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 5,
        },
    }
    ids, params = double.seen[0]
    assert bytes(ids).decode() == prompt
    assert (params.max_tokens, params.stop, params.top_k) == (50, ("x",), 3)
    streamed = whole(told)
    assert streamed.pop("id").startswith("msg-") and streamed == body


@run_async
async def test_thoughts_text_and_tools_in_whatever_pieces():
    async with client_of(engine(SAID)) as client:
        _, body = await post(client, tools=TOOLS, max_tokens=500)
    kinds = [block["type"] for block in body["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [b["input"] for b in body["content"][2:]] == [{"city": "Nîmes"}, {}]
    assert body["stop_reason"] == "tool_use"
    for size in (1, 3, 7, len(SAID)):
        double = engine(*(SAID[i : i + size] for i in range(0, len(SAID), size)))
        async with client_of(double) as client:
            message = whole(await stream(client, tools=TOOLS))
        for ours, theirs in zip(message["content"], body["content"], strict=True):
            ids = ours.pop("id", ""), theirs.get("id", "")
            assert ours == {k: v for k, v in theirs.items() if k != "id"}
            assert ids[0][:5] == ids[1][:5]
        assert message["stop_reason"] == "tool_use"


@run_async
async def test_a_call_that_is_cut_off():
    said = SAID[: SAID.index("îmes")]
    double = engine(*said)
    double.ends = "length"
    async with client_of(double) as client:
        _, body = await post(client, tools=TOOLS, max_tokens=500)
        told = await stream(client, tools=TOOLS)
    *_, block = body["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {})
    assert body["stop_reason"] == "max_tokens"
    deltas = [e["delta"] for e in told if e["type"] == "content_block_delta"]
    pieces = [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"]
    assert "".join(pieces) == '{"city": "N' and len(pieces) > 3
    assert [e["type"] for e in told[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    # What goes on behind a call that went wrong is text, in a block of its own.
    async with client_of(engine(*said, 'x", NaN}')) as client:
        told = await stream(client, tools=TOOLS)
    blocks = [e["content_block"]["type"] for e in told if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use", "text"]


@run_async
async def test_what_came_before_reaches_the_template():
    double = engine("ok")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "t1",
                    "name": "weather",
                    "input": {"city": "Rome"},
                    # Null or so in what Anthropic's client was given, and sends back.
                    "caller": {"type": "direct"},
                    "toolset_name": None,
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    async with client_of(double) as client:
        status, body = await post(client, messages=turns, tools=TOOLS)
        assert status == 200, body
        prompt = bytes(double.seen[0][0]).decode()
        order = ["<user>Where?", "<assistant>Let me look.", "<tool>Error: rain", "<user>So?"]
        places = [prompt.index(part) for part in [*order, "<assistant>It is"]]
        assert places == sorted(places)
        assert not prompt.endswith("<assistant>")
        status, body = await post(client, url=f"{URL}/count_tokens", messages=turns, tools=TOOLS)
        assert (status, body) == (200, {"input_tokens": len(double.seen[0][0])})


def test_thoughts_are_one_however_many_blocks_they_come_in():
    blocks = [{"type": "thinking", "thinking": one} for one in ("hm", "rain?")]
    turns = [USER, {"role": "assistant", "content": blocks}, USER]
    limits = Limits(vocab_size=256, max_logprobs=20, max_prompts=None, defaults={})
    read = parse_messages({"max_tokens": 5, "messages": turns}, limits).prompt.messages
    assert read[1]["reasoning_content"] == "hm\nrain?"


@run_async
async def test_why_it_ends():
    async with client_of(EngineDouble(ends="length")) as client:
        assert (await post(client))[1]["stop_reason"] == "max_tokens"
        assert whole(await stream(client))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [{"role": "system", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_result"}]}]),
        ("temperature", 1.5),
        ("tools", [{"name": "f"}]),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("tool_choice", {"type": "tool"}),
        ("tool_choice", {"type": "some"}),
        ("thinking", {"type": "enabled"}),
        ("thinking", {"type": "enabled", "budget_tokens": 0}),
        ("thinking", {"type": "enabled", "budget_tokens": 50}),
        ("thinking", {"type": "enabled", "budget_tokens": 20}),
        ("thinking", {"type": "adaptive", "budget_tokens": 20}),
        ("thinking", {"type": "much"}),
        ("system", [{"type": "image"}]),
        ("metadata", {"who": "me"}),
        ("stream", "yes"),
        ("mcp_servers", [{"url": "x"}]),
        ("nonsense", 1),
    ],
)
@run_async
async def test_what_is_refused(field, value):
    async with client_of(EngineDouble()) as client:
        status, body = await post(client, **{field: value})
        assert status == 400 and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert field in body["error"]["message"]
        assert (await post(client))[0] == 200


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tools": [{"name": "f", "input_schema": {"type": 3}}]}, "tools[0].input_schema"),
    ],
)
@run_async
async def test_what_chats_refuse_names_the_fields_of_this_api(fields, named):
    async with client_of(EngineDouble()) as client:
        status, body = await post(client, **fields)
        assert status == 400 and named in body["error"]["message"], body
        assert ".function" not in body["error"]["message"]


@run_async
async def test_a_budget_of_thinking():
    double = engine(*SAID, template="</think> {{ thinking }}")
    asked = {"type": "enabled", "budget_tokens": 20}
    async with client_of(double) as client:
        status, body = await post(client, thinking=asked)
        assert status == 200, body
        counted = await post(client, url=f"{URL}/count_tokens", thinking=asked)
        await post(client, thinking={"type": "disabled"})
        await post(client, thinking={"type": "adaptive"})
        double.tokenizer.tool_template = "no tags"
        status, body = await post(client, thinking=asked)
    assert status == 400 and "thinking.budget_tokens is 20" in body["error"]["message"]
    prompts = [bytes(ids).decode() for ids, _ in double.seen]
    assert "thinking=True" in prompts[0] and "thinking=False" in prompts[1]
    assert "thinking=" not in prompts[2]
    assert counted == (200, {"input_tokens": len(prompts[0])})
    assert [p.thinking_token_budget for _, p in double.seen] == [20, None, None]


@run_async
async def test_failures_have_anthropics_shape():
    async with client_of(EngineDouble(), ServerConfig(api_key=("s3cret",))) as client:
        status, body = await post(client)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    async with client_of(EngineDouble(fails=RuntimeError("ouch"), fails_at=1)) as client:
        told = await stream(client)
    assert told[-1]["type"] == "error" and told[-1]["error"]["type"] == "api_error"
    async with client_of(None) as client:
        status, body = await post(client)
        assert (status, body["error"]["type"]) == (503, "overloaded_error")


@run_async
async def test_anthropics_own_client():
    anthropic = pytest.importorskip("anthropic")
    async with client_of(engine(*SAID)) as client:
        theirs = anthropic.AsyncAnthropic(base_url=str(client.make_url("/")), api_key="none")
        asked = {"model": "double", "max_tokens": 500, "messages": [USER], "tools": TOOLS}
        message = await theirs.messages.create(**asked)
        assert [block.type for block in message.content][-1] == "tool_use"
        async with theirs.messages.stream(**asked) as streamed:
            final = await streamed.get_final_message()
        assert [b.type for b in final.content] == [b.type for b in message.content]
        assert final.content[2].input == {"city": "Nîmes"}
        count = await theirs.messages.count_tokens(model="double", messages=[USER])
        assert count.input_tokens == len("<user>hi<assistant>")
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await theirs.messages.create(**asked, extra_body={"temperature": 5})
