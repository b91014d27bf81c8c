"""/v1/responses over HTTP, with an engine that says what the test tells it to."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from llmjax.errors import EngineDeadError, InvalidRequestError, QueueFullError
from llmjax_serving.config import ServerConfig
from llmjax_serving.responses import STORE
from llmjax_serving.schema.response_items import items, messages

from .double import MAX_MODEL_LEN, MODEL, ByteTokenizer, EngineDouble, client_of, run_async, until
from .test_tools import CALLS, CITY, QWEN, SAID, engine

URL = "/v1/responses"
SPEC = json.loads((Path(__file__).parents[1] / "oracles/data/openai_responses.json").read_text())
TOOLS = [
    {"type": "function", "name": "weather", "parameters": CITY},
    {"type": "function", "name": "now", "description": "the time"},
]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@cache
def checker(name):
    return jsonschema.Draft202012Validator(SPEC | {"$ref": f"#/$defs/{name}"})


def conforms(value, name):
    checker(name).validate(value)
    return value


def event_schemas():
    """The name of the schema of each type of event."""
    names = [one["$ref"].split("/")[-1] for one in SPEC["$defs"]["ResponseStreamEvent"]["anyOf"]]
    return {SPEC["$defs"][n]["properties"]["type"]["enum"][0]: n for n in names}


EVENTS = event_schemas()


async def post(client, **body):
    response = await client.post(URL, json={"input": "hi", **body})
    answer = await response.json()
    if response.status == 200:
        conforms(answer, "Response")
    return response.status, answer


async def stream(client, **body):
    response = await client.post(URL, json={"input": "hi", "stream": True, **body})
    assert response.status == 200, await response.text()
    return told(await response.text())


def told(text):
    """The events of a stream, which say twice what they are."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(conforms(event, EVENTS[event["type"]]))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def without_ids(body):
    """What does not differ from one response to the next."""
    left = {k: v for k, v in body.items() if k not in ("id", "created_at", "completed_at")}
    output = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in body["output"]
    ]
    return left | {"output": output}


def put_together(events):
    """The output that a client has which knows of deltas only."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            assert event["content_index"] == len(items[-1]["content"])
            items[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert event["item_id"] == items[-1]["id"]
            part = items[-1]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", []))
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
    return items


@asynccontextmanager
async def openai_client(double):
    async with client_of(double) as client:
        url = str(client.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as theirs:
            yield theirs


def prompts(double):
    return [bytes(ids).decode() for ids, _ in double.seen]


def test_items_become_the_messages_that_chat_templates_know():
    def call(number):
        return {"type": "function_call", "call_id": number, "name": "f", "arguments": "{}"}

    def called(number):
        return {"id": number, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    given = [
        {"role": "developer", "content": "In French."},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        *(call("1"), call("2")),
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"type": "function_call_output", "call_id": "2", "output": "e", "name": "f"},
        call("3"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"role": "system", "content": "In Greek."},
    ]
    assert messages(items(given, "input"), "Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nIn French."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "c",
            "tool_calls": [called("1"), called("2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "d"},
        {"role": "tool", "tool_call_id": "2", "name": "f", "content": "e"},
        {"role": "assistant", "tool_calls": [called("3")]},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "reasoning_content": "So."},
        {"role": "system", "content": "In Greek."},
    ]


@run_async
async def test_an_answer_has_openai_shape():
    double = EngineDouble()
    async with client_of(double) as client:
        status, body = await post(client, instructions="Be brief.", metadata={"a": "b"}, user="me")
    assert status == 200
    prompt = "<system>Be brief.<user>hi<assistant>"
    assert prompts(double) == [prompt]
    assert double.seen[0][1].max_tokens == MAX_MODEL_LEN - len(prompt)
    (item,) = body["output"]
    assert body["id"].startswith("resp_") and item["id"].startswith("msg_")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    assert body["completed_at"] >= body["created_at"]
    assert without_ids(body) | {"output": []} == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": MODEL,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": "me",
        "usage": {
            "input_tokens": len(prompt),
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt) + 5,
        },
    }


@run_async
async def test_events_of_a_plain_text():
    async with client_of(EngineDouble()) as client:
        events = await stream(client)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["output"] == put_together(events)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        (SAID + "\nThat is all.", {"tools": TOOLS}),
        (SAID, {"tools": TOOLS, "parallel_tool_calls": False}),
        (SAID[:-20], {"tools": TOOLS}),
        (SAID[:60], {"tools": TOOLS}),
        (SAID[: SAID.index("îmes")], {"tools": TOOLS}),
        (SAID.replace('"Nîmes"', "NaN"), {"tools": TOOLS}),
        (SAID[SAID.index("<tool") :], {"tools": TOOLS}),
        ("<think>Well,", {}),
        ("<think>Well</think>Hi", LOGPROBS),
        ("", LOGPROBS),
    ],
)
@pytest.mark.parametrize("ends", ["stop", "length"])
@run_async
async def test_a_stream_is_the_whole_answer_in_whatever_pieces(said, fields, ends):
    answers = []
    for size in (1, 5, 17, 1000):
        pieces = [said[i : i + size] for i in range(0, len(said), size)] or [""]
        double = engine(*pieces)
        double.ends = ends
        async with client_of(double) as client:
            _, whole = await post(client, **fields)
            events = await stream(client, **fields)
        assert events[-1]["type"] == f"response.{whole['status']}"
        assert events[-1]["response"]["output"] == put_together(events)
        answers += [without_ids(whole), without_ids(events[-1]["response"])]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["status"] == ("completed" if ends == "stop" else "incomplete")
    assert (answers[0]["incomplete_details"] is None) == (ends == "stop")


@run_async
async def test_items_come_in_the_order_in_which_they_were_said():
    async with client_of(engine(SAID + "\nThat is all.")) as client:
        _, body = await post(client, tools=TOOLS)
    thought, before, *calls, after = body["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Which city?")
    assert before["content"][0]["text"] == "Let me look."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert all(call["call_id"].startswith("call_") for call in calls)
    assert after["content"][0]["text"] == "That is all."
    assert {item["status"] for item in body["output"]} == {"completed"}


class Slashed(ByteTokenizer):
    """What ends the reasoning is one token: its slash."""

    tool_template = QWEN

    def encode(self, text, add_special_tokens=True):
        return list(b"/") if text == "</think>" else super().encode(text, add_special_tokens)


@pytest.mark.parametrize("size", [1, 4, 100])
@run_async
async def test_log_probabilities_are_those_after_the_reasoning(size):
    said = "<think>Well</think>Hi"
    pieces = [said[i : i + size] for i in range(0, len(said), size)]
    async with client_of(EngineDouble(says=pieces, tokenizer=Slashed())) as client:
        _, body = await post(client, **LOGPROBS)
        events = await stream(client, **LOGPROBS)
    for answer in (body, events[-1]["response"]):
        (part,) = answer["output"][1]["content"]
        assert part["text"] == "Hi"
        assert "".join(entry["token"] for entry in part["logprobs"]) == "think>Hi"
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        reasoning_tokens = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert reasoning_tokens == len("<think>Well</")


@run_async
async def test_openai_client():
    class City(BaseModel):
        city: str

    async with openai_client(engine(*SAID)) as client:
        whole = await client.responses.create(model=MODEL, input="hi", tools=TOOLS)
        assert whole.output_text == "Let me look."
        assert [item.type for item in whole.output if item.type != "message"] == [
            *("reasoning", "function_call", "function_call"),
        ]
        async with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as events:
            deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
            final = await events.get_final_response()
        assert "".join(deltas) == final.output_text == whole.output_text
        assert final.output[2].arguments == whole.output[2].arguments
        again = await client.responses.retrieve(final.id)
        assert again.output_text == final.output_text
        assert [item.id for item in again.output] == [item.id for item in final.output]
        page = await client.responses.input_items.list(final.id)
        assert [item.content[0].text async for item in page] == ["hi"]
        assert (await client.responses.cancel(final.id)).status == "completed"
        await client.responses.delete(final.id)
        for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await gone(final.id)
            assert caught.value.code == "response_not_found"
    double = EngineDouble(says=['{"city": ', '"Nice"}'])
    async with openai_client(double) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=City)
    assert parsed.output_parsed == City(city="Nice")
    assert json.loads(double.seen[0][1].structured_outputs.json)["title"] == "City"


@run_async
async def test_a_conversation_goes_on():
    double = engine(*SAID)
    async with client_of(double) as client:
        _, first = await post(client, instructions="Be brief.", tools=TOOLS)
        calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call, "output": "warm"}
            for call in calls[:1]
        ]
        double.says = ["It is warm."]
        _, second = await post(client, input=outputs, previous_response_id=first["id"])
        await client.delete(f"{URL}/{first['id']}")
        _, third = await post(client, input="And now?", previous_response_id=second["id"])
        listed = await client.get(f"{URL}/{third['id']}/input_items?order=asc&limit=100")
        items = conforms(await listed.json(), "ResponseItemList")["data"]
        last = await (await client.get(f"{URL}/{third['id']}/input_items?limit=2")).json()
        rest = await (
            await client.get(f"{URL}/{third['id']}/input_items?after={last['last_id']}")
        ).json()
    assert second["previous_response_id"] == first["id"]
    assert prompts(double)[0].startswith("<system>Be brief.<user>hi")
    said = "<user>hi<assistant>Let me look.<tool>warm"
    assert prompts(double)[1:] == [
        f"{said}<assistant>",
        f"{said}<assistant>It is warm.<user>And now?<assistant>",
    ]
    assert [item["type"] for item in items] == [
        *("message", "reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "message", "message"),
    ]
    assert [item["id"] for item in items[1:5]] == [item["id"] for item in first["output"]]
    assert last["has_more"] and not rest["has_more"]
    assert last["data"] + rest["data"] == items[::-1]


@run_async
async def test_what_a_client_keeps_itself_is_the_same_conversation():
    double = engine(*SAID)
    async with client_of(double) as client:
        _, first = await post(client, tools=TOOLS, store=False)
        said = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        _, known = await post(client, tools=TOOLS)
        references = [{"type": "item_reference", "id": item["id"]} for item in known["output"]]
        for output in (first["output"], references):
            call = (first if output is not references else known)["output"][-1]["call_id"]
            told = {"type": "function_call_output", "call_id": call}
            told["output"] = [{"type": "input_text", "text": "noon"}]
            status, body = await post(client, input=[*said, *output, told], store=False)
            assert status == 200, body
        response = await client.get(f"{URL}/{body['id']}")
        assert response.status == 404
    assert prompts(double)[2:] == ["<user>hi<assistant>Let me look.<tool>noon<assistant>"] * 2


@run_async
async def test_each_owner_has_its_own():
    async with client_of(EngineDouble()) as client:
        _, body = await post(client)
        store = client.server.app[STORE]
        store.get(body["id"], "anonymous").owner = "another"
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            response = await client.request(method, f"{URL}/{body['id']}{path}")
            assert response.status == 404
        status, refused = await post(client, previous_response_id=body["id"])
        assert (status, refused["error"]["param"]) == (400, "previous_response_id")
        reference = {"type": "item_reference", "id": body["output"][0]["id"]}
        status, refused = await post(client, input=[reference])
        assert (status, refused["error"]["param"]) == (400, "input[0].id")


@run_async
async def test_the_least_used_are_forgotten_first():
    async with client_of(EngineDouble(), ServerConfig(max_stored_responses=2)) as client:
        ids = [(await post(client))[1]["id"] for _ in range(2)]
        await client.get(f"{URL}/{ids[0]}")
        ids.append((await post(client))[1]["id"])
        assert [(await client.get(f"{URL}/{i}")).status for i in ids] == [200, 404, 200]


@run_async
async def test_a_server_may_store_nothing():
    async with client_of(EngineDouble(), ServerConfig(max_stored_responses=0)) as client:
        _, body = await post(client)
        assert body["store"] is False
        assert (await client.get(f"{URL}/{body['id']}")).status == 404
        status, refused = await post(client, store=True)
        assert (status, refused["error"]["param"]) == (400, "store")


@pytest.mark.parametrize("streamed", [False, True])
@run_async
async def test_cancel_ends_what_runs(streamed):
    double = EngineDouble(gate=asyncio.Event())
    async with client_of(double) as client:
        asking = asyncio.ensure_future(client.post(URL, json={"input": "hi", "stream": streamed}))
        await until(lambda: double.pulled)
        (response_id,) = double.running
        running = await (await client.get(f"{URL}/{response_id}")).json()
        assert conforms(running, "Response")["status"] == "in_progress"
        status, refused = await post(client, previous_response_id=response_id)
        assert (status, refused["error"]["param"]) == (400, "previous_response_id")
        cancelled = await (await client.post(f"{URL}/{response_id}/cancel")).json()
        assert not double.running
        response = await asking
        answer = told(await response.text())[-1]["response"] if streamed else await response.json()
        stored = await (await client.get(f"{URL}/{response_id}")).json()
    assert answer == cancelled == stored
    assert conforms(answer, "Response")["status"] == "cancelled"
    (item,) = answer["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")


@run_async
async def test_delete_ends_what_runs():
    double = EngineDouble(gate=asyncio.Event())
    async with client_of(double) as client:
        asking = asyncio.ensure_future(stream(client))
        await until(lambda: double.pulled)
        (response_id,) = double.running
        assert (await client.delete(f"{URL}/{response_id}")).status == 200
        assert (await asking)[-1]["type"] == "response.incomplete"
        assert (await client.get(f"{URL}/{response_id}")).status == 404


@run_async
async def test_a_client_that_leaves_stops_its_response():
    double = EngineDouble(gate=asyncio.Event())
    async with client_of(double) as client:
        for streamed, left in ((True, 200), (False, 404)):
            response = asyncio.ensure_future(
                client.post(URL, json={"input": "hi", "stream": streamed})
            )
            await until(lambda: double.running)
            (response_id,) = double.running
            if streamed:
                (await response).close()
            else:
                response.cancel()
            await until(lambda: not double.running and not client.state.active)
            assert (await client.get(f"{URL}/{response_id}")).status == left


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDeadError("it broke"), "server_error"), (ValueError("secret"), "server_error")],
)
@run_async
async def test_an_error_in_the_middle_is_the_last_event(error, code):
    double = EngineDouble(fails=error, fails_at=1)
    async with client_of(double) as client:
        *_, last = await stream(client)
        assert last["type"] == "response.failed"
        failed = last["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", code)
        assert failed["output"][0]["content"][0]["text"] == "Hel"
        assert "secret" not in failed["error"]["message"]
        assert await (await client.get(f"{URL}/{failed['id']}")).json() == failed
        status, body = await post(client)
        assert status >= 500 and body["error"]["type"] == "server_error"


@run_async
async def test_what_is_refused_by_the_engine_is_no_response():
    for error, wanted in ((QueueFullError("full"), 429), (InvalidRequestError("no"), 400)):
        async with client_of(EngineDouble(fails=error)) as client:
            for streamed in (False, True):
                assert (await post(client, stream=streamed))[0] == wanted
            assert not client.server.app[STORE].items("")


@run_async
async def test_truncation_leaves_out_the_first_turns():
    double = EngineDouble()
    turns = [
        {"role": role, "content": f"{role[0]}{i}" + "." * 200}
        for i in range(4)
        for role in ("user", "assistant")
    ]
    given = [
        {"role": "developer", "content": "Be brief."},
        *turns,
        {"role": "user", "content": "?"},
    ]
    async with client_of(double) as client:
        status, body = await post(client, input=given)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["param"] == "input"
        status, _ = await post(client, input=given, truncation="auto", max_output_tokens=100)
        assert status == 200
        status, body = await post(client, input="?" * MAX_MODEL_LEN, truncation="auto")
        assert (status, body["error"]["param"]) == (400, "input")
    (prompt,) = prompts(double)
    assert prompt.startswith("<system>Be brief.<user>u2") and prompt.endswith("<user>?<assistant>")


@run_async
async def test_which_functions_may_be_called():
    double = engine(*SAID)
    one = {"type": "function", "name": "now"}
    async with client_of(double) as client:
        bodies = [
            (await post(client, tools=TOOLS, tool_choice=choice))[1]
            for choice in (
                "none",
                "required",
                one,
                {"type": "allowed_tools", "mode": "auto", "tools": [one]},
                {"type": "allowed_tools", "mode": "required", "tools": [one]},
            )
        ]
    called = [[i["name"] for i in b["output"] if i["type"] == "function_call"] for b in bodies]
    assert called == [[], ["weather", "now"], ["now"], ["now"], ["now"]]
    bound = [params.structured_outputs for _, params in double.seen]
    assert bound[0] is None and bound[3] is None
    assert ["weather" in bound[i].grammar for i in (1, 2, 4)] == [True, False, False]
    assert ["weather" in prompt for prompt in prompts(double)] == [False, True, True, True, True]


@run_async
async def test_what_is_asked_for_reaches_the_engine():
    double = EngineDouble()
    double.tokenizer.tool_template = "{{ reasoning_effort }} </think>"
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    async with client_of(double) as client:
        status, body = await post(
            client,
            max_output_tokens=7,
            reasoning={"effort": "low"},
            thinking_token_budget=6,
            seed=5,
            stop=["x"],
            temperature=0.5,
            text={"format": schema},
            top_k=3,
            logit_bias={"65": 5},
            user="me",
        )
    assert status == 200, body
    ((_, params),) = double.seen
    assert (params.max_tokens, params.seed, params.stop) == (7, 5, ("x",))
    assert params.thinking_token_budget == 6 and params.reasoning is not None
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 3, {65: 5})
    assert params.structured_outputs.label == "response_format.json_schema.schema"
    assert double.options[0].user == "me"
    assert prompts(double)[0].startswith("<user>hireasoning_effort=low")
    assert body["reasoning"]["effort"] == "low" and body["temperature"] == 0.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"include": ["all"]}, "include[0]"),
        ({"include": LOGPROBS["include"], "tools": TOOLS}, "include"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "a"}]},
            "input[0].encrypted_content",
        ),
        ({"instructions": 5}, "instructions"),
        ({"logit_bias": {"a": 5}}, "logit_bias"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": MAX_MODEL_LEN}, "max_output_tokens"),
        ({"max_output_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a" * 65: "a"}}, "metadata"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"model": "another"}, "model"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"store": 1}, "store"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS["include"]}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
    ],
)
def test_refusals_name_the_field(fields, param):
    @run_async
    async def test():
        double = engine("a")
        async with client_of(double) as client:
            status, body = await post(client, **fields)
        assert (status, body["error"]["param"]) == (404 if param == "model" else 400, param)
        assert param in body["error"]["message"] or param in ("model", "input", "max_output_tokens")
        assert "response_format" not in body["error"]["message"]
        assert not double.seen

    test()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?include[]=reasoning.encrypted_content", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
        ("/input_items?order=asc&order=desc", "order"),
    ],
)
@run_async
async def test_queries_that_are_refused(query, param):
    async with client_of(EngineDouble()) as client:
        _, body = await post(client)
        response = await client.get(f"{URL}/{body['id']}{query}")
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
