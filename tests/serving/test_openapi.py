"""/openapi.json: it names every route, and says of requests what the tables say."""

from __future__ import annotations

import jsonschema
import pytest

from llmjax.errors import InvalidRequestError
from llmjax_serving.openapi import REQUESTS, UNDESCRIBED, document
from llmjax_serving.schema.chat import parse_chat
from llmjax_serving.schema.completion import parse_completion
from llmjax_serving.schema.responses import chat_request, parse_response

from .browser import PROGRAM, browser
from .double import EngineDouble, client_of, run_async
from .test_schema import BAD_SAMPLING, LIMITS, USER


def read_response(body, limits):
    request = parse_response(body)
    return chat_request(request, request.items, limits)


BODIES = {
    "CompletionRequest": ({"prompt": "a"}, parse_completion),
    "ChatRequest": ({"messages": [USER]}, parse_chat),
    "ResponseRequest": ({"input": [USER]}, read_response),
}
NOT_SAID = {
    *("logit_bias", "stop_token_ids", "allowed_token_ids", "prompt_logprobs", "model"),
    *("stop", "bad_words", "response_format", "structured_outputs", "max_tokens", "n"),
    *("stream_options", "length_penalty"),
}
"""Fields of which the model, the server's flags, sizes or other fields have a say as well."""


@run_async
async def test_every_route_is_described():
    async with client_of(EngineDouble()) as client:
        routes = {r.resource.canonical for r in client.server.app.router.routes()}
        response = await client.get("/openapi.json")
        assert response.status == 200 and await response.json() == document()
    assert routes - UNDESCRIBED == set(document()["paths"])


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_what_it_refuses_is_refused(name, field, value):
    body, parse = BODIES[name]
    checker = jsonschema.Draft202012Validator(REQUESTS[name])
    assert checker.is_valid(body)
    wrong = body | {field: value}
    try:
        parse(wrong, LIMITS)
    except InvalidRequestError:
        assert field in NOT_SAID or not checker.is_valid(wrong)
    else:
        assert checker.is_valid(wrong)


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
@run_async
async def test_a_page_lists_it(tmp_path):
    async with client_of(EngineDouble()) as client, browser(tmp_path) as tab:
        await tab.open(str(client.make_url("/docs")), width=390, height=800, mobile=True)
        await tab.until("document.querySelectorAll('details').length >= 9")
        text = await tab.value("document.body.textContent")
        for words in ("POST /v1/chat/completions", "temperature", "number from 0 up to 2"):
            assert words in text
        assert await tab.value("document.documentElement.scrollWidth") <= 390
        assert not tab.complaints
