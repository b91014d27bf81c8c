"""What requests may say, and how refusals name the field at fault."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmjax.errors import InvalidRequestError
from llmjax.request import RequestOptions, SamplingParams
from llmjax_serving.schema.chat import CHAT_NO_OPS, parse_chat
from llmjax_serving.schema.chat import FIELDS as CHAT_FIELDS
from llmjax_serving.schema.completion import COMPLETION_NO_OPS, parse_completion
from llmjax_serving.schema.completion import FIELDS as COMPLETION_FIELDS
from llmjax_serving.schema.messages import parse_messages
from llmjax_serving.schema.responses import parse_response
from llmjax_serving.schema.sampling import OPTIONS, SAMPLING, Limits
from llmjax_serving.schema.tokens import TOKENIZE_CHAT, parse_detokenize, parse_tokenize

LIMITS = Limits(vocab_size=100, max_logprobs=20, max_prompts=5, defaults={})
USER = {"role": "user", "content": "hi"}


def completion(**fields):
    return parse_completion({"prompt": "a", **fields}, LIMITS)


def chat(**fields):
    return parse_chat({"messages": [USER], **fields}, LIMITS)


BAD_SAMPLING = [
    ("temperature", 999999),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", float("inf")),
    ("top_p", -1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("n", 0),
    ("n", 65),
    ("n", "2"),
    ("seed", 2**63),
    ("seed", "x"),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 10**400),
    ("min_tokens", -1),
    ("min_tokens", [1]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["a"] * 65),
    ("stop", ["a" * 2000] * 3),
    ("bad_words", ["a" * 100] * 200),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [100]),
    ("stop_token_ids", "a"),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", "x"),
    ("priority", 1.5),
    ("priority", 2**63),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("user", ["me"]),
    ("timeout", 0),
    ("timeout", "1"),
    ("queue_timeout", -1),
    ("logit_bias", {"191222": -100}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"7": 1, "07": -1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"0": 1e30}),
    ("logit_bias", {"9" * 5000: 1}),
    ("temperature", 10**400),
    ("repetition_penalty", 10**300),
    ("logit_bias", {"0": "1"}),
    ("logit_bias", [1]),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("model", 1),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "structural_tag", "format": None}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": []}}),
    ("response_format", {"type": ["text"]}),
    ("response_format", {"type": "json_object", "schema": {}}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": 5}),
    ("structured_outputs", {"regex": "a", "json": {}}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"ragex": "a"}),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("request_id", "a b"),
    ("request_id", "x" * 129),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [100]),
    ("bad_words", [""]),
    ("bad_words", "no"),
    ("length_penalty", 2),
    ("service_tier", "flex"),
    ("store", True),
    ("store", 0),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
@pytest.mark.parametrize("parse", [completion, chat])
def test_bad_values_are_refused_by_name(parse, field, value):
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{field: value})
    assert re.split(r"[.\[]", caught.value.param)[0] == field
    assert field in str(caught.value)


@pytest.mark.parametrize("parse", [completion, chat])
def test_unknown_fields_are_refused_by_name(parse):
    with pytest.raises(InvalidRequestError, match="unknown field: temprature") as caught:
        parse(temprature=0.5)
    assert caught.value.param == "temprature"


@pytest.mark.parametrize("parse", [completion, chat])
def test_every_sampling_field_arrives(parse):
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": -7,
        "min_tokens": 3,
        "max_tokens": 30,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "prompt_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["no"],
    }
    assert given.keys() == SAMPLING.keys() | {"max_tokens"}
    expected = SamplingParams(**{**given, "logit_bias": {5: 1.5}})
    assert parse(**given).params == expected


@pytest.mark.parametrize("parse", [completion, chat])
def test_every_option_arrives(parse):
    given = {"priority": -3, "cache_salt": "s", "user": "me", "timeout": 2, "queue_timeout": 0.5}
    assert given.keys() == OPTIONS.keys()
    assert parse(**given).options == RequestOptions(**given)
    assert parse().options == RequestOptions()


def test_the_models_own_defaults_apply_where_the_client_says_nothing():
    limits = replace(LIMITS, defaults={"temperature": 0.6, "top_k": 20})
    params = parse_completion({"prompt": "a", "top_k": 5}, limits).params
    assert (params.temperature, params.top_k) == (0.6, 5)


@pytest.mark.parametrize("parse", [completion, chat])
def test_null_means_not_given(parse):
    tables = {completion: (COMPLETION_FIELDS, COMPLETION_NO_OPS), chat: (CHAT_FIELDS, CHAT_NO_OPS)}
    fields, no_ops = tables[parse]
    nulls = {name: None for name in (*fields, *no_ops) if name not in ("prompt", "messages")}
    assert parse(**nulls) == parse()


def test_fields_that_ask_for_nothing_are_accepted():
    both = {
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "length_penalty": 1,
        "bad_words": [],
    }
    assert completion(**both, suffix="", best_of=1) == completion()
    tools = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert chat(**both, **tools, modalities=["text"], verbosity="medium") == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", {}),
        ("tool_choice", "required"),
        ("parallel_tool_calls", "no"),
        ("include_reasoning", 1),
        ("reasoning_effort", "much"),
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ 1 }}"),
        ("echo", 1),
        ("documents", "a"),
        ("modalities", ["audio"]),
        ("max_completion_tokens", 0),
        ("top_logprobs", 2),
        ("logprobs", 2),
        ("messages", []),
        ("messages", {}),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"self": 1}),
        ("chat_template_kwargs", {"split_special_tokens": False}),
        ("split_special_tokens", "no"),
    ],
)
def test_chat_refuses(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        chat(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "robot", "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "hi", "mood": "good"}, "messages[0].mood"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_chat_refuses_messages(message, param):
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=[message])
    assert caught.value.param == param


def test_chat_messages_are_read_as_templates_expect_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        ]
    )
    assert request.prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
        },
    ]


def test_chat_names_of_the_token_limit():
    assert chat().params.max_tokens is None
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    with pytest.raises(InvalidRequestError, match="max_completion_tokens"):
        chat(max_completion_tokens=5, max_tokens=6)


def test_chat_logprobs():
    assert chat().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    with pytest.raises(InvalidRequestError, match="up to 20") as caught:
        chat(logprobs=True, top_logprobs=1000)
    assert caught.value.param == "top_logprobs"


def test_continue_final_message():
    said = {"role": "assistant", "content": "The"}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(messages=[USER, said], **fields).prompt.continue_final_message
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        chat(messages=[USER, said], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="assistant message at the end"):
        chat(**fields)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([1.0, 99], [[1, 99]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [2, 3]], ["a", [2, 3]]),
    ],
)
def test_completion_prompts(prompt, read):
    assert completion(prompt=prompt).prompts == read


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [-1], [100], [2**31], [1, "a"], ["a", 1], [[1], [True]], [[1.5]]),
        *(5, {"a": 1}, [None], True),
    ],
)
def test_completion_refuses_prompts(prompt):
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_more_prompts_than_could_ever_wait_are_refused():
    assert len(completion(prompt=["a"] * 5).prompts) == 5
    with pytest.raises(InvalidRequestError, match="6 prompts were sent, allowed: 5"):
        completion(prompt=["a"] * 6)


def test_completion_needs_a_prompt():
    with pytest.raises(InvalidRequestError, match="prompt is required"):
        parse_completion({}, LIMITS)


def test_completion_echo():
    assert completion(echo=True, logprobs=3).params.prompt_logprobs == 3
    assert completion(logprobs=3).params.prompt_logprobs is None
    assert completion(echo=True, max_tokens=0).echo_only


@pytest.mark.parametrize("value", [-1, 0, 2**31, 99999999999999999999999, "x"])
def test_what_max_tokens_may_be_is_said_in_one_way(value):
    shown = '"x"' if value == "x" else value
    allowed = f"max_tokens is {shown}, allowed: an integer from 1 to 2147483647"
    with pytest.raises(InvalidRequestError, match=f"^{allowed}, or 0 where echo is true$"):
        completion(max_tokens=value)
    with pytest.raises(InvalidRequestError, match=f"^{allowed}$"):
        chat(max_tokens=value)
    with pytest.raises(InvalidRequestError, match=f"^{allowed}$"):
        parse_messages({"messages": [USER], "max_tokens": value}, LIMITS)
    allowed = allowed.replace("max_tokens", "max_output_tokens")
    with pytest.raises(InvalidRequestError, match=f"^{allowed}$"):
        parse_response({"input": "hi", "max_output_tokens": value})


def test_completion_best_of_has_no_other_meaning_than_n():
    assert completion(n=3, best_of=3).params.n == 3
    with pytest.raises(InvalidRequestError, match="the value of n"):
        completion(n=1, best_of=3)


@pytest.mark.parametrize(
    ("parse", "field", "value"),
    [
        *((parse, name, 0) for parse in (completion, chat) for name in ("prompt_logprobs", "seed")),
        *((parse, "top_p", 0.5) for parse in (completion, chat)),
        (completion, "logprobs", 0),
        (chat, "logprobs", True),
        (completion, "stop", "x"),
        (completion, "response_format", {"type": "json_object"}),
    ],
)
def test_what_a_beam_search_does_not_give_is_refused(parse, field, value):
    nothing = {"top_p": 1, "presence_penalty": 0, "stop": [], "echo": False, "min_tokens": 0}
    assert parse(use_beam_search=True, n=2, **nothing).beam.beam_width == 2
    with pytest.raises(InvalidRequestError, match="none in a beam search") as caught:
        parse(**{"use_beam_search": True, **nothing, field: value})
    assert caught.value.param == field


def test_prompt_logprobs_are_not_streamed():
    with pytest.raises(InvalidRequestError, match="cannot be streamed"):
        completion(stream=True, prompt_logprobs=1)
    with pytest.raises(InvalidRequestError, match="include_obfuscation"):
        completion(stream=True, stream_options={"include_obfuscation": True})


def test_tokenize_reads_text_or_messages():
    assert parse_tokenize({"prompt": "a"}, LIMITS).add_special_tokens
    nulls = dict.fromkeys(TOKENIZE_CHAT)
    assert parse_tokenize({**nulls, "prompt": "a"}, LIMITS).prompt == "a"
    assert parse_tokenize({"prompt": None, "messages": [USER]}, LIMITS).prompt.messages == [USER]
    request = parse_tokenize({"messages": [USER], "add_generation_prompt": False}, LIMITS)
    assert request.prompt.add_generation_prompt is False
    with pytest.raises(InvalidRequestError, match="prompt is required"):
        parse_tokenize({}, LIMITS)
    with pytest.raises(InvalidRequestError, match="prompt is not supported with the value"):
        parse_tokenize({"messages": [USER], "prompt": "a"}, LIMITS)


@pytest.mark.parametrize("tokens", [[-1], [100], ["a"], 5])
def test_detokenize_refuses(tokens):
    with pytest.raises(InvalidRequestError) as caught:
        parse_detokenize({"tokens": tokens}, LIMITS)
    assert caught.value.param == "tokens"


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(
    ("field", "value", "kind", "wanted"),
    [
        ("response_format", {"type": "json_object"}, "json_object", True),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}},
            "json",
            "{}",
        ),
        ("response_format", {"type": "json_object", "value": {}}, "json", "{}"),
        ("structured_outputs", {"json": {"type": "null"}}, "json", '{"type": "null"}'),
        ("structured_outputs", {"regex": "a+"}, "regex", "a+"),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice", ("a", "b")),
        ("structured_outputs", {"grammar": "start: A"}, "grammar", "start: A"),
    ],
)
def test_what_an_output_must_be(parse, field, value, kind, wanted):
    asked = parse(**{field: value}).params.structured_outputs
    assert (asked.kind, asked.value) == (kind, wanted)
    assert asked.label.startswith(field)
    # As OpenAI's strict mode asks for; elsewhere a schema means what it says.
    assert asked.disable_additional_properties == (field == "response_format" and kind == "json")


@pytest.mark.parametrize("parse", [completion, chat])
def test_an_output_must_be_one_thing(parse):
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        parse(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
