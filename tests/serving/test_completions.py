"""/v1/completions over HTTP, with an engine that says what the test tells it to."""

from __future__ import annotations

import json

import pytest

from .double import (
    BOS,
    EOS,
    MAX_MODEL_LEN,
    ByteTokenizer,
    EngineDouble,
    client_of,
    events,
    run_async,
)

URL = "/v1/completions"


async def post(client, **body):
    response = await client.post(URL, json=body)
    return response.status, await response.json()


async def stream(client, **body):
    response = await client.post(URL, json={"stream": True, **body})
    assert response.status == 200, await response.text()
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(await response.text())
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@run_async
async def test_answer_has_openai_shape():
    async with client_of(EngineDouble()) as client:
        status, body = await post(client, prompt="abc", model="double")
    assert status == 200
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "double",
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


@run_async
async def test_choices_are_numbered_prompt_by_prompt():
    engine = EngineDouble()
    async with client_of(engine) as client:
        _, body = await post(client, prompt=["a", [98, 99]], n=2)
        chunks = await stream(client, prompt=["a", [98, 99]], n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 20
    assert [ids for ids, _ in engine.seen] == [[97], [98, 99]] * 2
    texts = dict.fromkeys(range(4), "")
    ends = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert texts == dict.fromkeys(range(4), "Hello")
    assert sorted(ends) == [0, 1, 2, 3]


@run_async
async def test_stream_ends_once_and_says_usage_when_asked():
    async with client_of(EngineDouble()) as client:
        plain = await stream(client, prompt="abc")
        counted = await stream(client, prompt="abc", stream_options={"include_usage": True})
        running = await stream(
            client,
            prompt="abc",
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    assert [chunk["choices"][0]["text"] for chunk in plain] == ["Hel", "lo"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in plain] == [None, "stop"]
    assert all("usage" not in chunk for chunk in plain)
    *chunks, last = counted
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert [chunk["usage"]["completion_tokens"] for chunk in running] == [3, 5, 5]
    assert len({chunk["id"] for chunk in counted}) == 1


@run_async
async def test_max_tokens_defaults_to_16_or_what_the_context_holds():
    engine = EngineDouble()
    async with client_of(engine) as client:
        await post(client, prompt="abc")
        await post(client, prompt="a" * (MAX_MODEL_LEN - 4))
        await post(client, prompt="abc", max_tokens=700)
    assert [params.max_tokens for _, params in engine.seen] == [16, 4, 700]


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [
        (MAX_MODEL_LEN + 1, None, "prompt"),
        (MAX_MODEL_LEN, None, "prompt"),
        (MAX_MODEL_LEN - 100, 101, "max_tokens"),
    ],
)
@run_async
async def test_what_does_not_fit_the_context_is_refused_with_the_numbers(length, max_tokens, param):
    engine = EngineDouble()
    async with client_of(engine) as client:
        body = {"prompt": "a" * length, "max_tokens": max_tokens}
        status, answer = await post(client, **body)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == param
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]
    assert str(length) in answer["error"]["message"]
    assert not engine.seen


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
@run_async
async def test_empty_prompts_are_refused(prompt):
    engine = EngineDouble()
    async with client_of(engine) as client:
        status, body = await post(client, prompt=prompt)
    assert status == 400
    assert "empty prompt" in body["error"]["message"]
    assert body["error"]["param"] == "prompt"
    assert not engine.seen


@run_async
async def test_an_empty_prompt_is_bos_where_the_tokenizer_adds_one():
    engine = EngineDouble(tokenizer=ByteTokenizer(adds_bos=True))
    async with client_of(engine) as client:
        assert (await post(client, prompt=""))[0] == 200
        assert (await post(client, prompt=[[]]))[0] == 400
        assert (await post(client, prompt="", add_special_tokens=False))[0] == 400
    assert [ids for ids, _ in engine.seen] == [[BOS]]


@pytest.mark.parametrize("prompt", [[-1], [2**31], [258], [[5, 258]]])
@run_async
async def test_ids_outside_the_vocabulary_are_refused(prompt):
    async with client_of(EngineDouble()) as client:
        status, body = await post(client, prompt=prompt)
    assert status == 400
    assert "0 to 257" in body["error"]["message"]


@run_async
async def test_echo():
    async with client_of(EngineDouble()) as client:
        _, body = await post(client, prompt="abc", echo=True)
        _, from_ids = await post(client, prompt=[97, EOS, 98], echo=True)
        _, nothing = await post(client, prompt="abc", echo=True, max_tokens=0)
        chunks = await stream(client, prompt="abc", echo=True, n=2)
        no_chunks = await stream(client, prompt="abc", echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == "abcHello"
    assert from_ids["choices"][0]["text"] == "a</s>bHello"
    assert nothing["choices"][0]["text"] == "abc"
    assert nothing["choices"][0]["finish_reason"] == "length"
    assert nothing["usage"]["completion_tokens"] == 0
    for k in range(2):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == k]
        assert [choice["text"] for choice in choices] == ["abcHel", "lo"]
    assert [c["choices"][0]["text"] for c in no_chunks] == ["abc"]
    assert no_chunks[-1]["choices"][0]["finish_reason"] == "length"


@run_async
async def test_logprobs_and_their_offsets():
    # A character of two bytes: its first byte is a token that adds no character yet.
    async with client_of(EngineDouble(says=["aé", "b"])) as client:
        _, body = await post(client, prompt="x", logprobs=2)
        chunks = await stream(client, prompt="x", logprobs=2)
        _, few = await post(client, prompt="x", logprobs=0)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-1.0] * 4
    assert logprobs["top_logprobs"][0] == {"b": -0.5, "a": -1.0}
    assert few["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -1.0}
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {key: parts[0][key] + parts[1][key] for key in parts[0]} == logprobs


@run_async
async def test_minus_infinity_becomes_a_number():
    async with client_of(EngineDouble()) as client:
        response = await client.post(URL, json={"prompt": "x", "logprobs": 5})
        text = await response.text()
    assert "Infinity" not in text
    top = json.loads(text)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert min(top.values()) == -9999.0


@run_async
async def test_echoed_logprobs_cover_the_prompt():
    engine = EngineDouble(says=["cd"], tokenizer=ByteTokenizer(adds_bos=True))
    async with client_of(engine) as client:
        _, body = await post(client, prompt="ab", logprobs=1, echo=True)
        (chunk,) = await stream(client, prompt="ab", logprobs=1, echo=True)
        _, scored = await post(client, prompt="ab", logprobs=1, echo=True, max_tokens=0)
    choice = body["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
    assert "prompt_logprobs" not in choice
    assert chunk["choices"][0]["logprobs"] == choice["logprobs"]
    assert scored["choices"][0]["logprobs"]["tokens"] == ["<s>", "a", "b"]


@run_async
async def test_prompt_logprobs_and_token_ids():
    async with client_of(EngineDouble(says=["c", "d"])) as client:
        _, body = await post(client, prompt="ab", prompt_logprobs=1, return_token_ids=True)
        chunks = await stream(client, prompt="ab", return_token_ids=True)
    choice = body["choices"][0]
    assert choice["token_ids"] == [99, 100]
    assert choice["prompt_token_ids"] == [97, 98]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[99], [100]]
    assert "prompt_token_ids" in chunks[0]["choices"][0]
    assert "prompt_token_ids" not in chunks[1]["choices"][0]


@run_async
async def test_text_that_splits_lines_elsewhere_stays_one_event():
    said = "a\u2028b\x85c\r\nd"
    async with client_of(EngineDouble(says=[said])) as client:
        response = await client.post(URL, json={"prompt": "a", "stream": True})
        raw = await response.read()
    lines = raw.decode().splitlines()
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == said


@run_async
async def test_a_prompt_is_cut_where_the_client_lets_it_be():
    engine = EngineDouble()
    async with client_of(engine) as client:
        status, body = await post(client, prompt="abcdef", truncate_prompt_tokens=2)
        assert status == 200 and body["usage"]["prompt_tokens"] == 2
        long = "x" * 2 * MAX_MODEL_LEN
        for most, kept in ((-1, MAX_MODEL_LEN - 16), (40, 40)):
            status, _ = await post(client, prompt=long, max_tokens=16, truncate_prompt_tokens=most)
            assert status == 200 and len(engine.seen[-1][0]) == kept
        status, body = await post(client, prompt=long)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert engine.seen[0][0] == list(b"ef")


@run_async
async def test_what_is_to_follow_stands_behind_the_gap():
    engine = EngineDouble()
    async with client_of(engine) as client:
        assert (await post(client, prompt="def f(", suffix="return x"))[0] == 200
        status, body = await post(client, prompt=[1, 2], suffix="x")
        assert (status, body["error"]["param"]) == (400, "suffix")
    assert bytes(engine.seen[0][0]) == b"<before>def f(<after>return x<middle>"


@run_async
async def test_ids_that_the_client_chooses_and_tokens_by_their_ids():
    async with client_of(EngineDouble()) as client:
        asked = {"logprobs": 1, "request_id": "mine-1", "return_tokens_as_token_ids": True}
        _, body = await post(client, prompt="a", **asked)
    assert body["id"] == "cmpl-mine-1"
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{b}" for b in b"Hello"]
    assert all(key.startswith("token_id:") for top in logprobs["top_logprobs"] for key in top)
