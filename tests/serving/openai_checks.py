"""What a user of the official client does. Runs under any major of `openai`, also alone:

python openai_checks.py http://localhost:8000/v1 KEY MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys

import openai

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def check_models(client: openai.OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).object == "model"


def check_chat(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.content) == whole.usage.completion_tokens <= 8
    assert all(len(item.top_logprobs) == 2 for item in choice.logprobs.content)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = chunks
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends == [None] * (len(ends) - 1) + [choice.finish_reason]
    with client.chat.completions.stream(**asked) as stream:
        events = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(events) == text


def check_tools(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    function = {"name": "paint", "parameters": schema, "strict": True}
    asked = {
        "model": model,
        "messages": MESSAGES,
        "temperature": 0,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    (call,), (again,) = whole.message.tool_calls, streamed.message.tool_calls
    assert call.function.name == again.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert call.function.arguments == again.function.arguments


def check_responses(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "temperature": 0, "max_output_tokens": 8}
    question = {"input": "What is the capital of France?"}
    whole = client.responses.create(**asked, **question)
    assert whole.status in ("completed", "incomplete")
    with client.responses.stream(**asked, **question) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    more = client.responses.create(**asked, input="And of Spain?", previous_response_id=whole.id)
    assert more.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(more.id).output_text == more.output_text
    client.responses.delete(whole.id)


def check_completions(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**asked, prompt=["The engine", "She sells"], n=2, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text.startswith("The engine")
    assert whole.choices[3].text.startswith("She sells")
    plain = client.completions.create(**asked, prompt="The engine", logprobs=2)
    assert whole.choices[1].text == "The engine" + plain.choices[0].text
    assert len(plain.choices[0].logprobs.token_logprobs) == plain.usage.completion_tokens
    stream = client.completions.create(**asked, prompt="The engine", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text


def check_errors(client: openai.OpenAI, model: str) -> None:
    expect(openai.NotFoundError, "model_not_found", client, "other")
    expect(openai.BadRequestError, "context_length_exceeded", client, model, max_tokens=10**6)
    wrong = client.with_options(api_key="wrong")
    expect(openai.AuthenticationError, "invalid_api_key", wrong, model)
    try:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
        assert error.type == "invalid_request_error"
    else:
        raise AssertionError("temperature 9 was taken")


def expect(kind: type, code: str, client: openai.OpenAI, model: str, **fields: int) -> None:
    try:
        client.chat.completions.create(model=model, messages=MESSAGES, **fields)
    except kind as error:
        assert error.code == code, error
    else:
        raise AssertionError(f"no {kind.__name__}")


async def check_many(base_url: str, key: str, model: str, count: int) -> None:
    """Streams side by side give what one alone gives."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:

        async def say(i: int) -> str:
            messages = [{"role": "user", "content": f"Say {i % 4}"}]
            stream = await client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        alone = [await say(i) for i in range(4)]
        together = await asyncio.gather(*map(say, range(count)))
        assert together == [alone[i % 4] for i in range(count)]


def check_all(base_url: str, key: str, model: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        for check in (
            check_models,
            check_chat,
            check_tools,
            check_completions,
            check_responses,
            check_errors,
        ):
            check(client, model)
    asyncio.run(check_many(base_url, key, model, 64))


if __name__ == "__main__":
    check_all(*sys.argv[1:])
    print(f"openai {openai.__version__}: all checks pass")
