"""Clients that people use, against a running server: `python check.py URL MODEL [NAME...]`.

Each client that is installed here does what its users do: answers whole and streamed, structured
output, calls and what came of them, errors. A client that is not installed is passed over. The
server is open (no `--api-key`), and its model has a chat template that knows of tools; what a small
model says is never judged, only what it is bound to. docs/clients.md has the results.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

ASKED = [{"role": "user", "content": "Paint the wall red."}]
COLOURS = ("red", "blue")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": list(COLOURS)}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paints the wall.", "parameters": SCHEMA},
}


class Server:
    """Attributes:
    root, v1: its address, alone and with the API's version, which clients want one or the other of.
    """

    def __init__(self, url: str, model: str):
        self.root = url.rstrip("/").removesuffix("/v1")
        self.v1, self.model = self.root + "/v1", model


CLIENTS: dict[str, tuple[str, Callable[[Server], Any]]] = {}
"""Names, the packages whose versions are told, and what is done."""


def client(package: str) -> Callable[[Callable[[Server], Any]], Callable[[Server], Any]]:
    def add(check: Callable[[Server], Any]) -> Callable[[Server], Any]:
        CLIENTS[check.__name__] = package, check
        return check

    return add


def wall() -> type:
    """What is asked for, as clients take it that read pydantic's models."""
    from pydantic import BaseModel

    class Wall(BaseModel):
        colour: Literal["red", "blue"]

    return Wall


def is_painted(arguments: str | dict) -> None:
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found["colour"] in COLOURS, found


def raises(kind: type[Exception], call: Callable[..., Any], **arguments: Any) -> Any:
    """The error, which must be of a kind."""
    try:
        call(**arguments)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@client("openai")
def openai(server: Server) -> None:
    import openai

    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as one:
        ask = {"model": server.model, "messages": ASKED, "temperature": 0}
        forced = {**ask, "tools": [TOOL], "tool_choice": "required"}
        said = one.chat.completions.create(**forced, max_tokens=200).choices[0]
        assert said.finish_reason == "tool_calls"
        is_painted(said.message.tool_calls[0].function.arguments)
        # A conversation goes on with the client's own objects, which say more than was asked for.
        done = {"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "done"}
        more = [*ASKED, said.message, done]
        for told in (more, [*ASKED, said.message.model_dump(), done]):
            one.chat.completions.create(**{**ask, "messages": told}, tools=[TOOL], max_tokens=4)
        with one.chat.completions.stream(**forced, max_tokens=200) as stream:
            again = stream.get_final_completion().choices[0].message
        assert again.tool_calls[0].function.arguments == (
            said.message.tool_calls[0].function.arguments
        )
        one.chat.completions.create(
            **{
                **ask,
                "messages": [*ASKED, again, {**done, "tool_call_id": again.tool_calls[0].id}],
            },
            max_tokens=4,
        )
        parsed = one.chat.completions.parse(**ask, response_format=wall(), max_tokens=60)
        assert parsed.choices[0].message.parsed.colour in COLOURS
        one.chat.completions.create(
            **{**ask, "messages": [*ASKED, parsed.choices[0].message, *ASKED]}, max_tokens=4
        )
        allowed = {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "paint"}}],
        }
        chosen = one.chat.completions.create(
            **ask,
            tools=[TOOL],
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
            max_tokens=60,
        )
        is_painted(chosen.choices[0].message.tool_calls[0].function.arguments)
        _openai_responses(one, server.model)
        one.completions.create(
            model=server.model, prompt="def add(a,", max_tokens=4, logprobs=2, echo=True
        )
        scored = one.completions.create(
            model=server.model, prompt=[[1, 2, 3]], max_tokens=0, logprobs=1, echo=True
        )
        assert len(scored.choices[0].logprobs.token_logprobs) == 3
        create = one.chat.completions.create
        error = raises(openai.NotFoundError, create, model="other", messages=ASKED)
        assert error.code == "model_not_found"


def _openai_responses(one: Any, model: str) -> None:
    tool = {"type": "function", **TOOL["function"]}
    ask = {"model": model, "temperature": 0, "max_output_tokens": 60}
    said = one.responses.create(**ask, input=ASKED, tools=[tool], tool_choice="required")
    call = next(item for item in said.output if item.type == "function_call")
    is_painted(call.arguments)
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    one.responses.create(**ask, input=[*ASKED, *said.output, done], tools=[tool], store=False)
    one.responses.create(**ask, input=[done], previous_response_id=said.id, tools=[tool])
    assert one.responses.parse(**ask, input=ASKED, text_format=wall()).output_parsed.colour
    with one.responses.stream(**ask, input=ASKED, tools=[tool], tool_choice="required") as stream:
        final = [event.type for event in stream][-1]
    assert final in ("response.completed", "response.incomplete"), final
    endless = {**ask, "max_output_tokens": 16, "extra_body": {"ignore_eos": True}}
    cut_off = one.responses.create(**endless, input=ASKED)
    assert cut_off.status == "incomplete" and cut_off.output[-1].status == "incomplete"
    assert cut_off.incomplete_details.reason == "max_output_tokens"
    with one.responses.stream(**endless, input=ASKED) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete" and last.response.incomplete_details is not None


@client("anthropic")
def anthropic(server: Server) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0) as one:
        ask = {"model": server.model, "max_tokens": 200, "messages": ASKED}
        tools = [{"name": "paint", "description": "Paints.", "input_schema": SCHEMA}]
        forced = {
            **ask,
            "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        said = one.messages.create(**forced)
        assert said.stop_reason == "tool_use"
        call = next(block for block in said.content if block.type == "tool_use")
        is_painted(call.input)
        done = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        for told in (said.content, [block.model_dump() for block in said.content]):
            more = [
                *ASKED,
                {"role": "assistant", "content": told},
                {"role": "user", "content": [done]},
            ]
            one.messages.create(**{**ask, "messages": more, "max_tokens": 4}, tools=tools)
        with one.messages.stream(**forced) as stream:
            final = stream.get_final_message()
        is_painted(next(block for block in final.content if block.type == "tool_use").input)
        assert one.messages.count_tokens(model=server.model, messages=ASKED).input_tokens > 4
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        one.messages.create(**{**ask, "max_tokens": 4}, system=system)
        error = raises(anthropic.NotFoundError, one.messages.create, **{**ask, "model": "other"})
        assert error.body["error"]["type"] == "not_found_error", error.body


@client("litellm")
def litellm(server: Server) -> None:
    import litellm

    litellm.suppress_debug_info = True
    for name in ("hosted_vllm", "openai"):
        ask = {
            "model": f"{name}/{server.model}",
            "api_base": server.v1,
            "api_key": "none",
            "num_retries": 0,
            "temperature": 0,
        }
        said = litellm.completion(
            **ask, messages=ASKED, tools=[TOOL], tool_choice="required", max_tokens=200
        )
        message = said.choices[0].message
        is_painted(message.tool_calls[0].function.arguments)
        done = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
        for told in (message, message.model_dump()):
            litellm.completion(**ask, messages=[*ASKED, told, done], tools=[TOOL], max_tokens=4)
        parts = list(
            litellm.completion(
                **ask,
                messages=ASKED,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert litellm.stream_chunk_builder(parts, messages=ASKED).usage.completion_tokens == 4
        bound = litellm.completion(**ask, messages=ASKED, response_format=wall(), max_tokens=60)
        is_painted(bound.choices[0].message.content)
        other = {**ask, "model": f"{name}/other", "messages": ASKED}
        raises(litellm.NotFoundError, litellm.completion, **other)
    litellm.text_completion(**ask, prompt="def add(a,", max_tokens=4)
    litellm.responses(
        model=f"openai/{server.model}",
        input="hi",
        max_output_tokens=4,
        api_base=server.v1,
        api_key="none",
    )
    reply = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"anthropic/{server.model}",
            api_base=server.root,
            api_key="none",
            messages=ASKED,
            max_tokens=4,
        )
    )
    assert reply["usage"]["output_tokens"] == 4


@client("langchain-openai")
def langchain(server: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    @tool
    def paint(colour: Literal["red", "blue"]) -> str:
        """Paints the wall."""
        return colour

    where = {"model": server.model, "base_url": server.v1, "api_key": "none", "max_retries": 0}
    for more in ({}, {"use_responses_api": True, "output_version": "responses/v1"}):
        model = ChatOpenAI(**where, max_tokens=100, temperature=0, stream_usage=True, **more)
        asked = [HumanMessage("Paint the wall red.")]
        said = model.bind_tools([paint], tool_choice="required").invoke(asked)
        is_painted(said.tool_calls[0]["args"])
        done = ToolMessage("done", tool_call_id=said.tool_calls[0]["id"])
        model.bind_tools([paint]).invoke([*asked, said, done])
        for method in ("json_schema", "function_calling"):
            assert model.with_structured_output(wall(), method=method).invoke("Paint.").colour
        parts = list(model.stream("hi"))
        assert parts and sum(p.usage_metadata["output_tokens"] for p in parts if p.usage_metadata)
        assert len(model.batch(["hi", "hello"])) == 2
    model = ChatOpenAI(**where, max_tokens=4, logprobs=True, top_logprobs=2, n=2, seed=1)
    assert model.invoke("hi").response_metadata["logprobs"]["content"]
    plain = OpenAI(**where, max_tokens=4)
    assert isinstance(plain.invoke("def add(a,"), str) and list(plain.stream("def add(a,"))


@client("langchain-anthropic")
def langchain_anthropic(server: Server) -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model=server.model, base_url=server.root, api_key="none", max_tokens=100, max_retries=0
    )
    said = model.bind_tools([TOOL], tool_choice="any").invoke("Paint the wall red.")
    is_painted(said.tool_calls[0]["args"])
    assert list(model.stream("hi"))
    assert model.with_structured_output(wall()).invoke("Paint the wall red.").colour in COLOURS


@client("llama-index-llms-openai-like")
def llamaindex(server: Server) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def paint(colour: Literal["red", "blue"]) -> str:
        """Paints the wall."""
        return colour

    model = OpenAILike(
        model=server.model,
        api_base=server.v1,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=100,
        context_window=512,
        max_retries=0,
    )
    asked = ChatMessage(role="user", content="Paint the wall red.")
    assert list(model.stream_chat([asked]))
    paints = FunctionTool.from_defaults(paint)
    said = model.chat_with_tools([paints], user_msg=asked, tool_required=True)
    (call, *_) = model.get_tool_calls_from_response(said)
    is_painted(call.tool_kwargs)
    done = ChatMessage(
        role="tool", content="done", additional_kwargs={"tool_call_id": call.tool_id}
    )
    model.chat_with_tools([paints], chat_history=[asked, said.message, done])
    assert model.as_structured_llm(wall()).chat([asked]).raw.colour in COLOURS
    plain = OpenAILike(
        model=server.model, api_base=server.v1, api_key="none", max_tokens=4, context_window=512
    )
    assert plain.complete("def add(a,").text and list(plain.stream_complete("def add(a,"))


@client("instructor")
def instructor(server: Server) -> None:
    import anthropic
    import instructor
    import openai

    Wall, Mode = wall(), instructor.Mode
    for mode in (Mode.JSON_SCHEMA, Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS):
        plain = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        one = instructor.from_openai(plain, mode=mode)
        most = "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"
        ask = {"model": server.model, "messages": ASKED, "response_model": Wall, "max_retries": 0}
        ask[most] = 100
        assert one.chat.completions.create(**ask, temperature=0).colour in COLOURS, mode
        if mode is not Mode.RESPONSES_TOOLS:
            *_, last = one.chat.completions.create_partial(**ask, temperature=0)
            assert last.colour in COLOURS
    plain = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0)
    one = instructor.from_anthropic(plain)
    found = one.messages.create(
        model=server.model, max_tokens=100, messages=ASKED, response_model=Wall, max_retries=0
    )
    assert found.colour in COLOURS


@client("outlines")
def outlines(server: Server) -> None:
    import openai
    import outlines
    from outlines.types import CFG, Regex

    plain = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    model = outlines.from_vllm(plain, server.model)
    is_painted(model("Paint the wall red.", wall(), max_tokens=60))
    is_painted("".join(model.stream("Paint the wall red.", wall(), max_tokens=60)))
    assert model("Paint the wall red.", Literal["red", "blue"], max_tokens=60) in COLOURS
    assert model("A number?", Regex("[0-9]{3}"), max_tokens=60).isdigit()
    assert model("A letter?", CFG('start: "a" | "b"'), max_tokens=60) in ("a", "b")
    is_painted(outlines.from_openai(plain, server.model)("Paint the wall red.", wall()))


@client("huggingface-hub")
def huggingface_hub(server: Server) -> None:
    from huggingface_hub import InferenceClient

    one = InferenceClient(base_url=server.v1, api_key="none")
    said = one.chat_completion(
        ASKED, model=server.model, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    is_painted(said.choices[0].message.tool_calls[0].function.arguments)
    assert list(one.chat_completion(ASKED, model=server.model, max_tokens=4, stream=True))
    form = {"type": "json_schema", "json_schema": {"name": "wall", "schema": SCHEMA}}
    bound = one.chat_completion(ASKED, model=server.model, response_format=form, max_tokens=60)
    is_painted(bound.choices[0].message.content)


@client("openai-agents")
def openai_agents(server: Server) -> None:
    import agents
    import openai

    painted: list[str] = []

    # Once is enough, and what is said then is bound: a small model would go on with either until
    # max_tokens, and this client raises where an answer was cut off.
    @agents.function_tool(is_enabled=lambda context, agent: not painted)
    def paint(colour: Literal["red", "blue"]) -> str:
        """Paints the wall."""
        painted.append(colour)
        return colour

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=200, temperature=0
    )
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        # A client of its own for each loop.
        plain = openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0)
        agent = agents.Agent(
            name="painter",
            instructions="Be brief.",
            model=kind(server.model, plain),
            model_settings=settings,
            tools=[paint],
            output_type=wall(),
        )
        painted.clear()
        done = asyncio.run(agents.Runner.run(agent, "Paint the wall red."))
        assert any(item.type == "tool_call_output_item" for item in done.new_items)
        assert painted[0] in COLOURS and done.final_output.colour in COLOURS


@client("pydantic-ai-slim")
def pydantic_ai(server: Server) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (NativeOutput(wall()), ToolOutput(wall())):
            agent = Agent(
                kind(server.model, provider=provider),
                output_type=output,
                instructions="Be brief.",
                model_settings={"max_tokens": 100, "temperature": 0},
                retries=0,
            )
            assert agent.run_sync("Paint the wall red.").output.colour in COLOURS


@client("dspy")
def dspy(server: Server) -> None:
    import dspy

    lm = dspy.LM(
        f"openai/{server.model}",
        api_base=server.v1,
        api_key="none",
        max_tokens=100,
        cache=False,
        num_retries=0,
    )
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())

    class Paint(dspy.Signature):
        """Say which colour is wanted."""

        wish: str = dspy.InputField()
        colour: Literal["red", "blue"] = dspy.OutputField()

    assert dspy.Predict(Paint)(wish="Paint the wall red.").colour in COLOURS


@client("haystack-ai")
def haystack(server: Server) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    one = OpenAIChatGenerator(
        model=server.model,
        api_base_url=server.v1,
        api_key=Secret.from_token("none"),
        generation_kwargs={"max_tokens": 8},
        max_retries=0,
    )
    assert one.run([ChatMessage.from_user("hi")])["replies"][0].text
    pieces: list[Any] = []
    one.run([ChatMessage.from_user("hi")], streaming_callback=pieces.append)
    assert pieces


@client("smolagents")
def smolagents(server: Server) -> None:
    import smolagents

    @smolagents.tool
    def paint(colour: str) -> str:
        """Paints the wall.

        Args:
            colour: of the paint.
        """
        return colour

    model = smolagents.OpenAIServerModel(server.model, api_base=server.v1, api_key="none")
    agent = smolagents.ToolCallingAgent([paint], model, max_steps=2, verbosity_level=0)
    agent.run("Paint the wall red.")


def main() -> int:
    url, model, *names = sys.argv[1:]
    os.environ.update(
        OPENAI_API_KEY="none",
        OPENAI_BASE_URL=Server(url, model).v1,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        HAYSTACK_TELEMETRY_ENABLED="False",
    )
    failed = 0
    for name, (package, check) in CLIENTS.items():
        if names and name not in names:
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"-       {name}: {package} is not installed")
            continue
        try:
            check(Server(url, model))
        except Exception:
            failed += 1
            print(f"FAILED  {name} {version}", traceback.format_exc(), sep="\n")
        else:
            print(f"ok      {name} {version}", flush=True)
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
