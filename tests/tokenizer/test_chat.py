"""Chat templates against transformers' apply_chat_template, and what goes wrong in them."""

from __future__ import annotations

from datetime import datetime

import pytest

from llmjax.errors import ChatTemplateError, InvalidRequestError
from llmjax.tokenizer import Tokenizer, tokenizer_from_gguf

from .conftest import fixture, small, small_metadata

CHAT = fixture("chat")
USER = [{"role": "user", "content": "Hi"}]


def with_template(source: str, **metadata) -> Tokenizer:
    ours = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return tokenizer_from_gguf(
        small_metadata("sentencepiece") | ours | {"tokenizer.chat_template": source}
    )


@pytest.mark.parametrize("case", CHAT["cases"], ids=lambda case: case["template"])
def test_equals_transformers(case):
    tokenizer = with_template(CHAT["templates"][case["template"]])
    arguments = {"add_generation_prompt": False, **case["arguments"]}
    if "text" in case:
        assert tokenizer.render_chat(case["messages"], **arguments) == case["text"]
        return
    with pytest.raises(InvalidRequestError) as error:
        tokenizer.render_chat(case["messages"], **arguments)
    if isinstance(error.value, ChatTemplateError) and "continue" not in case["error"]:
        assert str(error.value) == case["error"]


def test_cases_cover_refusals():
    refused = [case for case in CHAT["cases"] if "must alternate" in case.get("error", "")]
    assert {case["template"] for case in refused} == {"gemma", "mistral"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only two turns') }}", "^only two turns$"),
        ("{% if %}", "not valid Jinja: line 1"),
        ("{% unknown %}", "not valid Jinja: line 1"),
        ("{{ messages[0].nothing.more }}", "UndefinedError: .*no attribute 'nothing'"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0] + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_failures_reach_the_caller(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        with_template(source).render_chat(USER)


def test_no_template():
    with pytest.raises(ChatTemplateError, match="no chat template"):
        small("sentencepiece").render_chat(USER)


@pytest.mark.parametrize("messages", [[], ["Hi"], [None], None, 5, "Hi", {"role": "user"}])
def test_no_conversation(messages):
    with pytest.raises(InvalidRequestError, match=r"messages is .* allowed: a list of one or more"):
        with_template("").render_chat(messages)


def test_continue_and_generate_exclude_each_other():
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        with_template("").render_chat(USER, continue_final_message=True)


@pytest.mark.parametrize("content", [None, [], ["text"], [{"type": "image"}], 3])
def test_nothing_to_continue(content):
    messages = [*USER, {"role": "assistant", "content": content}]
    with pytest.raises(InvalidRequestError, match="needs text"):
        with_template("{{ messages }}").render_chat(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def test_template_that_drops_what_should_go_on():
    with pytest.raises(ChatTemplateError, match="does not write out"):
        with_template("{{ messages[0].role }}").render_chat(
            USER, add_generation_prompt=False, continue_final_message=True
        )


def test_continued_messages_are_the_callers_own():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    text = with_template("{{ messages[0].content[0].text }}!").render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "Hi"
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def test_clock():
    year = with_template("{{ strftime_now('%Y') }}").render_chat(USER)
    assert int(year) in (datetime.now().year, datetime.now().year - 1)


def test_named_templates():
    metadata = small_metadata("sentencepiece")
    metadata |= {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[{"type": "function"}]) == "tools"
    tokenizer.chat_template = "other"
    assert tokenizer.render_chat(USER, tools=[{"type": "function"}]) == "other"
    del metadata["tokenizer.chat_template"]
    with pytest.raises(ChatTemplateError, match="no default chat template, only tool_use"):
        tokenizer_from_gguf(metadata).render_chat(USER)


@pytest.mark.parametrize("written", ["", "{{ bos_token }}", "<s>"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_one_bos(written, add_bos):
    tokenizer = with_template(written + "{{ messages[0].content }}", add_bos_token=add_bos)
    ids = tokenizer.encode_chat(USER)
    assert ids.count(tokenizer.bos_token_id) == (add_bos or bool(written))
    assert tokenizer.decode(ids) == "Hi"


def test_chat_gets_no_eos_of_its_own():
    tokenizer = with_template("{{ messages[0].content }}", add_eos_token=True)
    assert tokenizer.encode("Hi")[-1] == 2
    assert tokenizer.encode_chat(USER)[-1] != 2
