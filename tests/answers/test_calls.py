"""Calls in text: what they mean, and that it does not matter in which pieces they come."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.answers.calls import CallParser
from llmjax.answers.syntaxes import SYNTAXES
from llmjax.config import TOOL_CALL_PARSERS
from llmjax.message import ChatMessage

from .texts import CASES, NAMES, NO_CALLS, hermes

MARKERS = sorted({m for syntax in SYNTAXES.values() for m in (*syntax.special, *syntax.leading)})


def read(name: str, *pieces: str, most: int | None = None) -> ChatMessage:
    parser = CallParser(SYNTAXES[name], NAMES, most)
    whole = ChatMessage()
    for news in (*map(parser.push, pieces), parser.finish()):
        whole.content += news.content
        whole.tool_calls += news.tool_calls
    return whole


def meaning(message: ChatMessage) -> tuple[str, list[tuple[str, dict]]]:
    return message.content, [(c.name, json.loads(c.arguments)) for c in message.tool_calls]


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
    assert meaning(read(name, *cut(text, ends))) == meaning(whole)
    if not whole.tool_calls:
        assert whole.content == text
    for call in whole.tool_calls:
        assert call.name in NAMES and isinstance(json.loads(call.arguments), dict)


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


@given(
    st.dictionaries(st.from_regex("[a-z_][a-z0-9_]{0,3}", fullmatch=True), VALUES, max_size=3),
    st.lists(st.integers(0, 2**16), max_size=4),
)
def test_what_python_writes_is_read(arguments, ends):
    text = "[add({})]".format(", ".join(f"{key}={value!r}" for key, value in arguments.items()))
    assert meaning(read("pythonic", *cut(text, ends))) == ("", [("add", arguments)])


def test_content_does_not_wait_for_what_cannot_be_a_call():
    parser = CallParser(SYNTAXES["hermes"], NAMES)
    said = [
        parser.push(piece).content for piece in ("Hi", " <", "b>", " <tool_c", "all>", "x", "y")
    ]
    assert said == ["Hi", "", " <b>", "", "", " <tool_call>x", "y"]


def test_a_call_is_given_out_as_soon_as_it_is_complete():
    text = hermes("now", "{}")
    parser = CallParser(SYNTAXES["hermes"], NAMES)
    assert not parser.push(text[:-1])
    assert len(parser.push(text[-1]).tool_calls) == 1


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
