"""Calls in text: what they mean, and that it does not matter in which pieces they come."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmjax.answers.calls import CallParser
from llmjax.answers.syntaxes import SYNTAXES
from llmjax.config import TOOL_CALL_PARSERS
from llmjax.message import ChatMessage

from .texts import CASES, FLAWED, NAMES, NO_CALLS, hermes

MARKERS = sorted({m for syntax in SYNTAXES.values() for m in (*syntax.special, *syntax.leading)})


def read(name: str, *pieces: str, most: int | None = None) -> ChatMessage:
    parser = CallParser(SYNTAXES[name], NAMES, most)
    whole = ChatMessage()
    for news in (*map(parser.push, pieces), parser.finish()):
        whole.add(news)
    return whole


def meaning(message: ChatMessage) -> tuple[str, list[tuple[str, object]]]:
    """What a call that is not whole means is its text."""
    calls = message.tool_calls
    return message.content, [
        (c.name, json.loads(c.arguments) if c.ends else c.arguments) for c in calls
    ]


def cut(text: str, ends: list[int]) -> list[str]:
    marks = [0, *sorted(end % (len(text) + 1) for end in ends), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def test_all_parsers_can_be_asked_for_and_are_tested():
    assert {"auto", *SYNTAXES} == set(TOOL_CALL_PARSERS)
    assert {case[0] for case in CASES} == set(SYNTAXES)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read(name, text, content, calls):
    assert meaning(read(name, text)) == (content, calls)
    assert meaning(read(name, *text)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(name, text):
    assert meaning(read(name, text)) == (text, [])
    assert meaning(read(name, *text)) == (text, [])


@given(st.sampled_from(CASES), st.lists(st.integers(0, 2**16), max_size=12))
def test_pieces_do_not_matter(case, ends):
    name, text, content, calls = case
    assert meaning(read(name, *cut(text, ends))) == (content, calls)


@given(
    st.sampled_from(sorted(SYNTAXES)),
    st.lists(
        st.sampled_from([*MARKERS, "now", "add(a=", '{"name": "now", "arguments": {}}', " ", "\n"])
        | st.text("{}[]()\"'\\,:=a1 <escap>`", max_size=4)
        | st.text(max_size=3),
        max_size=12,
    ),
    st.lists(st.integers(0, 2**16), max_size=6),
)
def test_any_text_is_read_and_pieces_do_not_matter(name, parts, ends):
    text = "".join(parts)
    whole = read(name, text)
    in_pieces = read(name, *cut(text, ends))
    assert meaning(in_pieces) == meaning(whole)
    arguments = [call.arguments for call in whole.tool_calls]
    assert [call.arguments for call in in_pieces.tool_calls] == arguments
    if not whole.tool_calls:
        assert whole.content == text
    for call in whole.tool_calls:
        assert call.name in NAMES
        assert not call.ends or isinstance(json.loads(call.arguments), dict)


@given(st.sampled_from(CASES), st.integers(0, 2**16), st.text(max_size=2))
def test_a_call_with_a_flaw_is_another_call_or_content(case, at, flaw):
    name, text, *_ = case
    at %= len(text) + 1
    broken = text[:at] + flaw + text[at + 1 :]
    whole = read(name, broken)
    if not whole.tool_calls:
        assert whole.content == broken


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner,
                      max_size=3),
    max_leaves=6,
)  # fmt: skip
FRAMED = sorted(name for name, syntax in SYNTAXES.items() if syntax.frame is not None)


@settings(max_examples=50)
@given(
    st.sampled_from(FRAMED),
    st.lists(st.dictionaries(st.text("ab\n\"'{", max_size=3), VALUES, max_size=3), min_size=1),
    st.lists(st.integers(0, 2**16), max_size=4),
)
def test_what_a_grammar_makes_a_parser_reads(name, many, ends):
    frame = SYNTAXES[name].frame
    many = many if frame.separator is not None else many[:1]
    said = [frame.head_of("add") + json.dumps(arguments) + frame.tail for arguments in many]
    text = frame.opening + (frame.separator or "").join(said) + frame.closing
    assert meaning(read(name, *cut(text, ends))) == ("", [("add", one) for one in many])


@settings(max_examples=50)
@given(
    st.sampled_from(FRAMED),
    st.dictionaries(st.text("ab\n\"'{", max_size=3), VALUES, max_size=3),
    st.booleans(),
    st.integers(0, 2**16),
    st.lists(st.integers(0, 2**16), max_size=6),
)
def test_what_is_told_of_arguments_is_how_they_begin(name, arguments, is_ascii, at, ends):
    frame = SYNTAXES[name].frame
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    text = frame.opening + frame.head_of("add") + written + frame.tail + frame.closing
    (call,) = read(name, *cut(text, ends)).tool_calls
    assert call.ends and call.arguments == written
    so_far = read(name, *cut(text[: at % len(text)], ends)).tool_calls
    assert all(written.startswith(piece.arguments) for piece in so_far)
    assert [piece.arguments == written for piece in so_far] == [piece.ends for piece in so_far]


def python_text(arguments: dict) -> str:
    return "[add({})]".format(", ".join(f"{key}={value!r}" for key, value in arguments.items()))


def gemma_text(arguments: dict) -> str:
    def written(value: object) -> str:
        if isinstance(value, str):
            return f"<escape>{value}<escape>"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    return f"<start_function_call>call:add{written(arguments)}<end_function_call>"


OTHER_WAYS = {"pythonic": python_text, "functiongemma": gemma_text}


def test_all_ways_to_write_arguments_are_tried():
    assert {name for name, s in SYNTAXES.items() if s.frame is None} == {*OTHER_WAYS, "gpt_oss"}


@given(
    st.sampled_from(sorted(OTHER_WAYS)),
    st.dictionaries(st.from_regex("[a-z_][a-z0-9_]{0,3}", fullmatch=True), VALUES, max_size=3),
    st.integers(0, 2**16),
    st.lists(st.integers(0, 2**16), max_size=6),
)
def test_what_is_told_begins_the_json_of_what_is_written_otherwise(name, arguments, at, ends):
    assume(name == "pythonic" or "<escape>" not in json.dumps(arguments))
    text, as_json = OTHER_WAYS[name](arguments), json.dumps(arguments, ensure_ascii=False)
    (call,) = read(name, *cut(text, ends)).tool_calls
    assert call.ends and call.arguments == as_json
    so_far = read(name, *cut(text[: at % len(text)], ends)).tool_calls
    assert all(as_json.startswith(piece.arguments) for piece in so_far)
    assert [piece.arguments == as_json for piece in so_far] == [piece.ends for piece in so_far]


def test_content_does_not_wait_for_what_cannot_be_a_call():
    parser = CallParser(SYNTAXES["hermes"], NAMES)
    said = [
        parser.push(piece).content for piece in ("Hi", " <", "b>", " <tool_c", "all>", "x", "y")
    ]
    assert said == ["Hi", "", " <b>", "", "", " <tool_call>x", "y"]


@pytest.mark.parametrize(("name", "text", "content", "arguments", "is_whole"), FLAWED)
def test_what_has_begun_as_a_call_is_one(name, text, content, arguments, is_whole):
    for message in (read(name, text), read(name, *text)):
        (call,) = message.tool_calls
        assert (call.arguments, call.ends, message.content) == (arguments, is_whole, content)


def test_arguments_are_given_out_as_they_come():
    text = hermes("write", '{"text": "a\\u00e9 \n☃", "n": 12, "on": true}')
    parser = CallParser(SYNTAXES["hermes"], NAMES)
    at = text.index('{"text')
    assert not parser.push(text[:at])
    news = [parser.push(char) for char in text[at:]]
    assert not any(message.content for message in news)
    pieces = [call for message in news for call in message.tool_calls]
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len({(piece.id, piece.name) for piece in pieces}) == 1
    told = [piece.arguments for piece in pieces]
    assert told == [
        *("{", '"', "t", "e", "x", "t", '": "', "a", "\\u00e9", " ", "\\n", "☃"),
        *('"', ', "', "n", '": 12', ', "', "o", "n", '": true}'),
    ]
    assert json.loads("".join(told)) == {"text": "aé \n☃", "n": 12, "on": True}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("pythonic", r"""[add(a=[12, True], b='x"\xe9 '), now()]""",
         ['{"a": [', "12", ", true]", ', "b": "', "x", '\\"', "é", " ", '"', "}", "{}"]),
        ("functiongemma", "<start_function_call>call:add{a:[12,true],b:<escape>a<b\n<escape>}",
         ["{", '"a": [', "12", ", true]", ', "b": "', "a", "<b", "\\n", '"', "}"]),
    ],
)  # fmt: skip
def test_arguments_that_are_no_json_are_given_out_as_they_come(name, text, told):
    parser = CallParser(SYNTAXES[name], NAMES)
    pieces = [call for char in text for call in parser.push(char).tool_calls]
    assert [piece.arguments for piece in pieces] == told
    assert [piece.arguments for piece in pieces if piece.ends] == [t for t in told if t[-1] == "}"]


def test_a_call_whose_name_comes_last_comes_whole():
    parser = CallParser(SYNTAXES["hermes"], NAMES)
    assert not parser.push('<tool_call>{"arguments": {}, "name": "now"')
    (call,) = parser.push("}").tool_calls
    assert (call.arguments, call.begins, call.ends) == ("{}", True, True)


def test_a_good_call_after_a_bad_one():
    text = f"<tool_call>{{oh no</tool_call>{hermes('now', '{}')}"
    assert meaning(read("hermes", text)) == ("<tool_call>{oh no</tool_call>", [("now", {})])


def test_one_call_where_one_is_asked_for():
    text = f"a{hermes('now', '{}')}b{hermes('add', '{}')}c"
    assert meaning(read("hermes", text, most=1)) == ("a", [("now", {})])
    text = '[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {}}]'
    assert meaning(read("json", text, most=1)) == ("", [("now", {})])


def test_ids_are_as_templates_want_them():
    calls = read("hermes", hermes("now", "{}") * 2).tool_calls
    assert len({call.id for call in calls}) == 2
    assert all(re.fullmatch(r"call_\w{24}", call.id) for call in calls)
    (call,) = read("mistral", "[TOOL_CALLS]now{}").tool_calls
    assert re.fullmatch(r"[A-Za-z0-9]{9}", call.id)
