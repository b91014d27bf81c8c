"""What has brought other servers down, or made them lie, by the reports about it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax_serving.schema import chat, completion

from .double import EngineDouble, client_of, events, run_async

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "a"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}

SAMPLING = {
    # llama.cpp 19367, vllm 44965
    "temperature": [999999, -1, "1"],
    "top_p": [-1, 0, 1.5],
    "repetition_penalty": [0, -1],
    # vllm 16529, 6866, sglang 7670
    "logit_bias": [{"191222": -100}, {"-1": 5}, {"abc": 1}, {"0": 1e30}, {"258": 1}],
    # local-inference-lab/vllm 264, vllm 44131, 54116
    "prompt_logprobs": [-1, 1000, "x"],
    "response_format": [
        {"type": "structural_tag", "format": None},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": None},
        {},
    ],
    "stop_token_ids": [[-1], [258]],
    "n": [0, 10**9],
}
OTHERS = [
    # vllm 7283, 7746
    *((COMPLETION, {"prompt": prompt}) for prompt in ("", [""], [], [[]])),
    # vllm 51795, 9634
    *((COMPLETION, {"prompt": ids}) for ids in ([-1], [2**31], [258], [[1], [258]], [1.5])),
    *(("/detokenize", {"tokens": ids}) for ids in ([-1], [2**31], [258])),
    (CHAT, {**MESSAGES, "logprobs": True, "top_logprobs": 1000}),
    (COMPLETION, {**PROMPT, "logprobs": 1000}),
    # vllm 16774, jan 6254
    (CHAT, {"messages": MESSAGES["messages"] * 2}),
    # ollama 4447, 3839: nothing is cut unasked
    (COMPLETION, {"prompt": "a" * 1000}),
    (COMPLETION, {"prompt": "a" * 1000, "max_tokens": 1}),
    (COMPLETION, {"prompt": "a" * 990, "max_tokens": 11}),
    (COMPLETION, {"prompt": ["a", "a" * 1000]}),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 1000}]}),
    (CHAT, {**MESSAGES, "max_tokens": 990}),
]
REQUESTS = OTHERS + [
    (url, {**body, field: value})
    for url, body in ((COMPLETION, PROMPT), (CHAT, MESSAGES))
    for field, values in SAMPLING.items()
    for value in values
]


@run_async
async def test_requests_that_are_wrong_are_refused_and_harm_nobody():
    engine = EngineDouble()
    async with client_of(engine) as client:
        for url, body in REQUESTS:
            for stream in ({}, {"stream": True}) if url != "/detokenize" else ({},):
                response = await client.post(url, json={**body, **stream})
                assert response.status == 400, body
                error = (await response.json())["error"]
                assert error["message"] and error["param"].split(".")[0].split("[")[0] in body
        assert not engine.seen, "none of them reached the engine"
        assert (await client.get("/health")).status == 200
        assert (await client.post(COMPLETION, json=PROMPT)).status == 200


LONG = "a" * 1000
TURN = {"role": "user", "content": LONG}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETION, {"prompt": LONG}),
        (CHAT, {"messages": [TURN]}),
        ("/v1/messages", {"messages": [TURN], "max_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES["messages"], "max_tokens": 1000}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": [TURN], "truncation": "auto"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1000}),
    ],
)
@run_async
async def test_no_endpoint_cuts_what_does_not_fit(url, body):
    """ollama 4447, 3839: not even the last turn, where others may be left out."""
    engine = EngineDouble()
    async with client_of(engine) as client:
        for stream in (False, True):
            response = await client.post(url, json={**body, "stream": stream})
            assert response.status == 400
            assert str(engine.max_model_len) in (await response.json())["error"]["message"]
    assert not engine.seen


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("url", "body", "names"),
    [
        (COMPLETION, PROMPT, sorted(completion.FIELDS)),
        (CHAT, MESSAGES, sorted(chat.FIELDS)),
    ],
)
def test_no_value_of_any_field_is_an_error_of_the_server(url, body, names):
    """As schemathesis did (vllm 44131)."""
    examples = []

    @given(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=2))
    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    def collect(fields):
        examples.append({**body, **fields})

    collect()

    @run_async
    async def send():
        engine = EngineDouble()
        async with client_of(engine) as client:
            for example in examples:
                response = await client.post(url, json=example)
                assert response.status < 500, example
                if response.status != 200:
                    assert (await response.json())["error"]["message"], example
            assert not engine.running

    send()


@pytest.mark.parametrize("ends", ["stop", "length"])
@pytest.mark.parametrize(("url", "body"), [(COMPLETION, PROMPT), (CHAT, MESSAGES)])
@run_async
async def test_a_streamed_choice_tells_once_why_it_ends(url, body, ends):
    """ollama 4357, vllm 19662, 27572, 16863."""
    async with client_of(EngineDouble(ends=ends)) as client:
        response = await client.post(url, json={**body, "stream": True, "n": 3})
        *chunks, done = events(await response.text())
        assert done == "[DONE]"
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        for index in range(3):
            reasons = [c["finish_reason"] for c in choices if c["index"] == index]
            assert reasons == [None] * (len(reasons) - 1) + [ends]
