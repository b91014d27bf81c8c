"""`llmjax serve` on a tiny model: the whole way from a socket to the device and back."""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import time

import pytest

from .conftest import KEY, Served

USER = {"role": "user", "content": "Hello there"}


@pytest.fixture(autouse=True)
def unharmed(server: Served):
    """After every case: healthy, answering, and no page in use."""
    yield
    assert server.call("/health")[0] == 200
    status, _ = server.call("/v1/completions", {"prompt": "The", "max_tokens": 1})
    assert status == 200
    wait_for(lambda: server.metric("num_requests_running") == 0)
    wait_for(lambda: server.metric("kv_cache_pages_used") == 0)


def wait_for(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come about in 10 s")


def complete(server: Served, **body):
    status, answer = server.call("/v1/completions", body)
    assert status == 200, answer
    return answer


def open_stream(server: Served, **body) -> tuple[http.client.HTTPConnection, object]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps({"stream": True, **body}), headers)
    return connection, connection.getresponse()


def chunks(response) -> list[dict]:
    lines = [line for line in response.read().decode().split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_curl_line_of_the_banner_works_as_pasted(server):
    line = server.banner[-1].strip()
    assert shlex.split(line)[0] == "curl"
    done = subprocess.run(
        ["sh", "-c", line + " --silent --show-error"],
        env={"LLMJAX_API_KEY": KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 127:
        pytest.skip("there is no curl here")
    assert json.loads(done.stdout)["object"] == "chat.completion"


def test_the_banner_names_memory_and_programs(server):
    text = "\n".join(server.banner)
    for word in ("weights", "KV cache", "step programs", "mixed"):
        assert word in text


def test_text_and_its_ids_are_the_same_prompt(server):
    asked = {"temperature": 0, "max_tokens": 8}
    _, tokens = server.call("/tokenize", {"prompt": "The engine reads"})
    by_text = complete(server, prompt="The engine reads", **asked)
    by_ids = complete(server, prompt=tokens["tokens"], **asked)
    assert by_ids["choices"] == by_text["choices"]
    assert by_text["usage"]["prompt_tokens"] == tokens["count"]
    _, text = server.call("/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "The engine reads"}


def test_choices_are_distinct_and_the_same_when_streamed(server):
    asked = {"prompt": "The", "n": 4, "temperature": 1, "seed": 1, "max_tokens": 12}
    whole = complete(server, **asked)
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 4
    _, response = open_stream(server, **asked, stream_options={"include_usage": True})
    *parts, last = chunks(response)
    assert last["usage"] == whole["usage"]
    streamed = dict.fromkeys(range(4), "")
    ends = []
    for choice in (choice for part in parts for choice in part["choices"]):
        streamed[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert [streamed[k] for k in range(4)] == texts
    assert sorted(ends) == [0, 1, 2, 3]


def test_beams_come_best_first_and_free_their_pages(server):
    asked = {"prompt": "The", "n": 4, "use_beam_search": True, "max_tokens": 6}
    answer = complete(server, **asked, return_token_ids=True)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 4
    greedy = complete(server, prompt="The", n=1, use_beam_search=True, max_tokens=6)
    plain = complete(server, prompt="The", temperature=0, max_tokens=6)
    assert greedy["choices"][0]["text"] == plain["choices"][0]["text"]
    status, error = server.call(
        "/v1/completions", {"prompt": "a", "n": 40, "use_beam_search": True}
    )
    assert (status, error["error"]["param"]) == (400, "n")


def test_logprobs_beside_truncated_sampling_are_numbers(server):
    answer = complete(server, prompt="The", logprobs=5, top_k=1, max_tokens=6)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["completion_tokens"]
    assert all(-9999 <= value <= 0 for top in logprobs["top_logprobs"] for value in top.values())


def test_echoed_logprobs_equal_those_of_generation(server):
    asked = {"temperature": 0, "logprobs": 1, "ignore_eos": True}
    said = complete(server, prompt="The engine", max_tokens=4, return_token_ids=True, **asked)
    (choice,) = said["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    scored = complete(server, prompt=ids, echo=True, max_tokens=0, **asked)
    again = scored["choices"][0]["logprobs"]["token_logprobs"][-4:]
    assert again == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert scored["usage"]["completion_tokens"] == 0


def test_a_stop_string_ends_the_text_before_it(server):
    asked = {"prompt": "She", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    text = complete(server, **asked)["choices"][0]["text"]
    stop = text[5:8]
    (choice,) = complete(server, **asked, stop=[stop])["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": [""]},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [320]},
        {"prompt": "a", "temperature": 999999},
        {"prompt": "a", "top_p": -1},
        {"prompt": "a", "repetition_penalty": 0},
        {"prompt": "a", "logit_bias": {"191222": -100}},
        {"prompt": "a", "logit_bias": {"-1": 5}},
        {"prompt": "a", "logit_bias": {"abc": 1}},
        {"prompt": "a", "logit_bias": {"0": 1e30}},
        {"prompt": "a", "prompt_logprobs": -1},
        {"prompt": "a", "logprobs": 1000},
        {"prompt": "a", "prompt_logprobs": "x"},
        {"prompt": "a", "response_format": {"type": "structural_tag", "format": None}},
        {"prompt": "a", "response_format": {"type": "json_schema"}},
        {"prompt": "a", "structured_outputs": {"regex": "("}},
        {"prompt": "a", "structured_outputs": {"regex": "["}},
        {"prompt": "a", "structured_outputs": {"regex": "(a{1,9999}){1,9999}"}},
        {"prompt": "a", "structured_outputs": {"grammar": 'start: "a"\nstart: "b"'}},
        {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}},
        {"prompt": list(range(3, 260))},
        {"prompt": "a", "max_tokens": 256},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_400(server, body, stream):
    status, answer = server.call("/v1/completions", {**body, "stream": stream})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


def test_structured_outputs(server):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Well?"}], "response_format": form}
    status, answer = server.call("/v1/chat/completions", {**body, "temperature": 1, "seed": 2})
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert isinstance(found["ok"], bool) and found["n"] <= 99
    asked = {"prompt": "a", "structured_outputs": {"choice": ["left", "right"]}, "logprobs": 3}
    status, answer = server.call("/v1/completions", {**asked, "max_tokens": 20})
    assert status == 200 and answer["choices"][0]["text"] in ("left", "right")


def test_a_client_that_leaves_frees_its_pages(server):
    asked = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "n": 4}
    connection, response = open_stream(server, **asked)
    assert response.readline()
    assert server.metric("kv_cache_pages_used") > 0
    connection.sock.close()
    response.close()
    before = server.metric("generation_tokens_total")
    wait_for(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("generation_tokens_total") - before < 4 * 200


def test_the_official_client_works(server):
    pytest.importorskip("openai")
    from .openai_checks import check_all

    check_all(f"{server.url}/v1", KEY, "tiny")


def test_without_the_key_nothing_but_health(server):
    assert server.call("/v1/models", key="wrong")[0] == 401
    assert server.call("/health", key="wrong")[0] == 200


def test_sigterm_lets_streams_finish(serve):
    own = serve()
    asked = {"prompt": "The", "max_tokens": 150, "ignore_eos": True}
    streams = [open_stream(own, **asked) for _ in range(4)]
    for _, response in streams:
        assert response.readline()
    own.process.terminate()
    wait_for(lambda: own.call("/health")[0] == 503)
    assert own.call("/v1/completions", {"prompt": "a"})[0] == 503
    for _, response in streams:
        *_, last = chunks(response)
        assert last["choices"][0]["finish_reason"] == "length"
    assert own.process.wait(30) == 0
