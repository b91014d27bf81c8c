"""Calls and results go back to the model as its chat template writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmjax.answers import read_tools
from llmjax.answers.answer import AnswerParser
from llmjax.answers.calls import CallParser
from llmjax.answers.reasoning import REASONING, ReasoningParser, detect_reasoning
from llmjax.answers.syntaxes import SYNTAXES, detect_syntax
from llmjax.errors import ChatTemplateError
from llmjax.tokenizer import template_variables
from llmjax.tokenizer.chat import ChatTemplate

from .test_calls import read
from .texts import NAMES, hermes

HERE = Path(__file__).parent
SOURCES = {
    path.stem: path.read_text()
    for folder in (HERE / "templates", HERE.parent / "tokenizer/fixtures/templates")
    for path in folder.glob("*.jinja")
}
TOOLS = read_tools(
    [{"type": "function", "function": {"name": name}} for name in ("get_weather", "add")]
)
USER = {"role": "user", "content": "Weather?"}
DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
CASES = [
    (
        "qwen2.5",
        "hermes",
        "Let me see.\n"
        + "\n".join([hermes("get_weather", '{"city": "Köln"}'), hermes("add", '{"a": [1.5]}')]),
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nsunny",
    ),
    (
        "llama3.1",
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Köln"}}',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"sunny"<|eot_id|>',
    ),
    (
        "mistral",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}}, '
        '{"name": "add", "arguments": {}}]',
        '[TOOL_RESULTS] {"content": sunny}',
    ),
    (
        "mistral_v3",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}',
        '[TOOL_RESULTS] {"content": sunny, "call_id": "',
    ),
    (
        "deepseek_v3.1",
        "deepseek_v31",
        "Hm.<｜tool▁calls▁begin｜>"
        + DEEPSEEK.format("get_weather", '{"city": "Köln"}')
        + DEEPSEEK.format("add", "{}")
        + "<｜tool▁calls▁end｜>",
        "<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>",
    ),
]


def render(name: str, messages: list[dict], **kwargs) -> str:
    template = ChatTemplate(SOURCES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    given = {"tools": [tool.as_dict() for tool in TOOLS], "documents": None, **kwargs}
    return template.render(
        messages, add_generation_prompt=True, continue_final_message=False, **given
    )


@pytest.mark.parametrize(("name", "parser", "text", "result"), CASES)
def test_what_the_model_said_comes_back_to_the_letter(name, parser, text, result):
    assert detect_syntax(SOURCES[name]) is SYNTAXES[parser]
    whole = text if parser != "mistral" or text.endswith("]") else text + "}]"
    message = read(parser, whole)
    assert message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    rendered = render(name, [USER, message.as_dict(), *results])
    assert text in rendered and result in rendered[rendered.index(text) :]
    assert all(f'"{tool.name}"' in rendered for tool in TOOLS) or name.startswith("deepseek")


def test_reasoning_comes_back_too():
    tags = detect_reasoning(SOURCES["qwen3"])
    assert tags is REASONING["qwen3"] or tags == REASONING["qwen3"]
    text = "<think>\nIs it warm?\n</think>\n\n" + hermes("get_weather", '{"city": "Köln"}')
    prompt = render("qwen3", [USER])
    parser = AnswerParser(
        ReasoningParser(tags.at_end_of(prompt)), CallParser(SYNTAXES["hermes"], NAMES)
    )
    message = parser.push(text, [], ended=True)
    assert (message.reasoning, message.content) == ("Is it warm?", "")
    assert text in render("qwen3", [USER, message.as_dict()])
    assert tags.at_end_of(render("qwen3", [USER], enable_thinking=False)) is None
    deepseek = SOURCES["deepseek_v3.1"]
    assert detect_reasoning(deepseek).at_end_of(render("deepseek_v3.1", [USER])) is None
    thinking = render("deepseek_v3.1", [USER], thinking=True)
    assert detect_reasoning(deepseek).at_end_of(thinking).is_open


def test_templates_say_what_turns_the_reasoning_on():
    switches = {"enable_thinking", "thinking", "reasoning_effort"}
    found = {name: template_variables(source) & switches for name, source in SOURCES.items()}
    assert found["qwen3"] == {"enable_thinking"} and found["deepseek_v3.1"] == {"thinking"}
    assert not found["qwen2.5"] and not found["mistral"] and not found["gemma"]
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        template_variables("{% if %}")


def test_templates_that_know_no_calls():
    assert detect_syntax(SOURCES["gemma"]) is detect_syntax(SOURCES["llama3"]) is None
    assert detect_reasoning(SOURCES["gemma"]) is detect_reasoning(SOURCES["mistral"]) is None
    # Its author's refusal reaches the client.
    call = read("hermes", hermes("add", "{}")).as_dict()
    with pytest.raises(ChatTemplateError, match="must alternate"):
        render("gemma", [USER, call, {"role": "tool", "content": "1"}, {"role": "tool"}])


def test_another_syntax_between_the_same_tags_is_not_taken_for_hermes():
    for sign in ("<function=", "<arg_key>"):
        assert detect_syntax(f"<tool_call>{sign}arguments") is None
