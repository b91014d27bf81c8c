"""/v1/chat/completions over HTTP, with an engine that says what the test tells it to."""

from __future__ import annotations

import asyncio
import json
import threading

from llmjax_serving.config import ServerConfig

from .double import MAX_MODEL_LEN, EngineDouble, client_of, events, run_async

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def post(client, **body):
    response = await client.post(URL, json={"messages": [USER], **body})
    return response.status, await response.json()


async def stream(client, **body):
    response = await client.post(URL, json={"messages": [USER], "stream": True, **body})
    assert response.status == 200, await response.text()
    *chunks, done = events(await response.text())
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@run_async
async def test_answer_has_openai_shape():
    engine = EngineDouble()
    async with client_of(engine) as client:
        status, body = await post(client)
    assert status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    prompt = "<user>hi<assistant>"
    assert body == {
        "object": "chat.completion",
        "model": "double",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    ids, params = engine.seen[0]
    assert bytes(ids).decode() == prompt
    assert params.max_tokens == MAX_MODEL_LEN - len(prompt)


@run_async
async def test_stream_begins_with_the_role_and_ends_once():
    async with client_of(EngineDouble()) as client:
        chunks = await stream(client, n=2, stream_options={"include_usage": True})
    *chunks, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    for k in range(2):
        mine = [choice for choice in choices if choice["index"] == k]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"] for choice in mine[1:]] == [{"content": "Hel"}, {"content": "lo"}]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]


@run_async
async def test_a_last_chunk_without_text_has_an_empty_delta():
    async with client_of(EngineDouble(says=["a", "", ""])) as client:
        chunks = await stream(client)
    assert [c["choices"][0]["delta"] for c in chunks[1:]] == [{"content": "a"}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@run_async
async def test_length_is_told():
    async with client_of(EngineDouble(says=["a", "b", "c"])) as client:
        chunks = await stream(client, max_completion_tokens=2)
        _, body = await post(client, max_tokens=2)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "ab"


@run_async
async def test_logprobs_carry_exact_bytes():
    async with client_of(EngineDouble(says=["é", "b"])) as client:
        _, body = await post(client, logprobs=True, top_logprobs=2)
        chunks = await stream(client, logprobs=True, top_logprobs=2)
        _, chosen = await post(client, logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[0xC3], [0xA9], [0x62]]
    assert content[0]["token"] == "\ufffd"
    assert content[2] == {
        "token": "b",
        "logprob": -1.0,
        "bytes": [98],
        "top_logprobs": [
            {"token": "c", "logprob": -0.5, "bytes": [99]},
            {"token": "b", "logprob": -1.0, "bytes": [98]},
        ],
    }
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [item for part in parts if part for item in part["content"]] == content
    assert [i["top_logprobs"] for i in chosen["choices"][0]["logprobs"]["content"]] == [[], [], []]


@run_async
async def test_prompt_logprobs_and_token_ids():
    async with client_of(EngineDouble()) as client:
        _, body = await post(client, prompt_logprobs=0, return_token_ids=True)
        first, *_ = await stream(client, return_token_ids=True)
    ids = list(b"<user>hi<assistant>")
    assert body["prompt_token_ids"] == first["prompt_token_ids"] == ids
    assert body["prompt_logprobs"][1] == {
        str(ids[1]): {"logprob": -1.0, "rank": 2, "decoded_token": "u"}
    }
    assert body["choices"][0]["token_ids"] == list(b"Hello")


@run_async
async def test_the_template_is_given_what_the_client_sent():
    engine = EngineDouble()
    said = {"role": "assistant", "content": "The"}
    async with client_of(engine) as client:
        await post(
            client,
            messages=[USER, said],
            add_generation_prompt=False,
            continue_final_message=True,
            chat_template_kwargs={"thinking": False},
        )
    assert bytes(engine.seen[0][0]).decode() == "<user>hi<assistant>Thethinking=False"


@run_async
async def test_special_tokens_in_messages_are_text_unless_they_are_asked_for():
    engine = EngineDouble()
    async with client_of(engine) as client:
        for asked in ({}, {"split_special_tokens": True}, {"split_special_tokens": False}):
            await post(client, messages=[USER], **asked)
    prompts = [bytes(ids).decode() for ids, _ in engine.seen]
    assert prompts == ["<user>hi<assistant>"] * 2 + [
        "<user>hisplit_special_tokens=False<assistant>"
    ]


@run_async
async def test_a_template_that_refuses_is_quoted():
    async with client_of(EngineDouble()) as client:
        status, body = await post(client, messages=[USER, USER])
    assert status == 400
    assert body["error"] == {
        "message": "roles must alternate",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }


@run_async
async def test_messages_that_do_not_fit_are_refused_with_the_numbers():
    engine = EngineDouble()
    long = {"role": "user", "content": "a" * MAX_MODEL_LEN}
    async with client_of(engine) as client:
        status, body = await post(client, messages=[long])
        _, asked = await post(client, max_tokens=MAX_MODEL_LEN)
    assert status == 400
    assert body["error"]["code"] == asked["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "messages"
    assert asked["error"]["param"] == "max_tokens"
    assert not engine.seen


@run_async
async def test_documents_and_a_template_of_ones_own_reach_the_template():
    engine, documents = EngineDouble(), [{"title": "T", "text": "x"}]
    trusting = ServerConfig(trust_request_chat_template=True)
    async with client_of(engine, trusting) as client:
        status, _ = await post(client, documents=documents, chat_template="{{ messages }}")
        assert status == 200
    prompt = bytes(engine.seen[0][0]).decode()
    assert "documents=[{'title': 'T', 'text': 'x'}]" in prompt
    assert "chat_template={{ messages }}" in prompt
    async with client_of(engine) as client:
        status, body = await post(client, chat_template="{{ messages }}")
        assert (status, body["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in body["error"]["message"]


@run_async
async def test_an_answer_that_begins_with_the_last_message():
    begun = [USER, {"role": "assistant", "content": "Well: "}]
    asked = {"messages": begun, "echo": True, "add_generation_prompt": False}
    async with client_of(EngineDouble()) as client:
        _, body = await post(client, **asked, continue_final_message=True)
        chunks = await stream(client, **asked, continue_final_message=True)
        _, plain = await post(client, echo=True)
    assert body["choices"][0]["message"]["content"] == "Well: Hello"
    deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
    assert "".join(deltas) == "Well: Hello"
    assert plain["choices"][0]["message"]["content"] == "Hello"


@run_async
async def test_a_long_conversation_is_cut_where_the_client_lets_it_be():
    engine = EngineDouble()
    async with client_of(engine) as client:
        status, body = await post(client, truncate_prompt_tokens=11, request_id="r1")
    assert status == 200 and body["id"] == "chatcmpl-r1"
    assert bytes(engine.seen[0][0]) == b"<assistant>"


@run_async
async def test_the_prompt_of_a_conversation_can_be_seen():
    engine = EngineDouble()
    async with client_of(engine) as client:
        body = {"messages": [USER], "temperature": 0.5}
        response = await client.post(f"{URL}/render", json=body)
        assert response.status == 200
        told = await response.json()
        cut = await client.post(f"{URL}/render", json=body | {"truncate_prompt_tokens": 11})
        assert (await cut.json())["prompt"] == "<assistant>"
        assert (await client.post(f"{URL}/render", json={"messages": []})).status == 400
    assert told["prompt"] == "<user>hi<assistant>"
    assert bytes(told["prompt_token_ids"]).decode() == told["prompt"]
    assert not engine.seen


@run_async
async def test_slow_schemas_of_functions_keep_nobody_elses_texts_waiting():
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    freed = threading.Event()
    async with client_of(EngineDouble()) as client:
        for _ in range(2):
            client.state.slow_pool.submit(freed.wait)
        bound = asyncio.create_task(post(client, tools=tools, tool_choice="required"))
        try:
            status, _ = await post(client)
            assert status == 200 and not bound.done()
        finally:
            freed.set()
        status, body = await bound
        assert status == 200, body
