"""Reasoning and answers, in whatever pieces they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.answers.answer import AnswerParser
from llmjax.answers.calls import CallParser
from llmjax.answers.channels import ChannelParser, Channels
from llmjax.answers.reasoning import REASONING, ReasoningParser, Tags
from llmjax.answers.syntaxes import SYNTAXES
from llmjax.config import REASONING_PARSERS
from llmjax.structured_outputs import Reasoning

from .test_calls import cut
from .texts import NAMES, hermes

TAGS = Tags("<think>", "</think>")
CASES = [
    (False, "<think>\nHm,\n\nso 4.\n</think>\n\nIt is 4.\n", "Hm,\n\nso 4.", "It is 4.\n"),
    (True, "Hm.\n</think>\n\n4", "Hm.", "4"),
    (True, "<think>Hm.</think>4", "Hm.", "4"),
    (False, "  4, or </think>", "", "  4, or </think>"),
    (False, "I think <think> so", "", "I think <think> so"),
    (False, "<think></think>4", "", "4"),
    (False, "<think>Hm < </think", "Hm < </think", ""),
    (False, "<thin", "", "<thin"),
    (True, "", "", ""),
    (False, "<think>a</think>b</think>c", "a", "b</think>c"),
]


def read(is_open: bool, *pieces: str) -> tuple[str, str]:
    parser = ReasoningParser(Reasoning(*vars(TAGS).values(), is_open))
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


def test_all_parsers_can_be_asked_for():
    assert {"auto", *REASONING} == set(REASONING_PARSERS)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "rest"), CASES)
def test_reasoning_is_split_off(is_open, text, reasoning, rest):
    assert read(is_open, text) == (reasoning, rest)
    assert read(is_open, *text) == (reasoning, rest)


@given(
    st.booleans(),
    st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", "</thi"]), max_size=10),
    st.lists(st.integers(0, 2**16), max_size=6),
)
def test_pieces_do_not_matter(is_open, parts, ends):
    text = "".join(parts)
    assert read(is_open, *cut(text, ends)) == read(is_open, text)


def test_reasoning_comes_as_it_is_written():
    parser = ReasoningParser(Reasoning(*vars(TAGS).values(), True))
    pieces = ("Hm", ". ", "So", " </", "think>", "\n", "4", " ok")
    assert [parser.push(piece) for piece in pieces] == [
        *(("Hm", ""), (".", ""), (" So", ""), ("", ""), ("", ""), ("", ""), ("", "4"), ("", " ok"))
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_prompt_says_where_an_answer_begins(prompt, expected):
    found = TAGS.at_end_of(prompt)
    assert (None if found is None else found.is_open) == expected


@pytest.mark.parametrize(
    ("begun", "expected"),
    [("", False), ("<think>Hm", True), ("<think>Hm</think>4", None), ("The", None)],
)
def test_an_answer_that_is_continued_has_begun(begun, expected):
    found = TAGS.within(begun)
    assert (None if found is None else found.is_open) == expected


@given(st.lists(st.integers(0, 2**16), max_size=8))
def test_calls_come_after_the_reasoning(ends):
    call = hermes("now", "{}")
    text = f"<think>I could write {call}.</think>\nNow:\n{call}"
    parser = AnswerParser(
        ReasoningParser(Reasoning(*vars(TAGS).values(), False)),
        CallParser(SYNTAXES["hermes"], NAMES),
        ord(">"),
    )
    *some, last = cut(text, ends)
    news = [parser.push(piece, list(piece.encode()), ended=False) for piece in some]
    news.append(parser.push(last, list(last.encode()), ended=True))
    assert "".join(part.reasoning for part in news) == f"I could write {call}."
    assert "".join(part.content for part in news) == "Now:"
    assert [c.name for part in news for c in part.tool_calls if c.begins] == ["now"]
    assert parser.num_reasoning_tokens == len("<think>")


HARMONY = [
    (
        "<|channel|>analysis<|message|>Need the <time>.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.now <|constrain|>json<|message|>{}",
        ("Need the <time>.", "Let me look.", ["now"]),
    ),
    (
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        ("", "", ["now"]),
    ),
    (
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>4!",
        ("So.", "4!", []),
    ),
    ("Plain < text.", ("", "Plain < text.", [])),
    ("<|channel|>ana", ("", "<|channel|>ana", [])),
    ("<|channel|>analysis<|message|>cut <|en", ("cut <|en", "", [])),
]


@given(st.sampled_from(HARMONY), st.lists(st.integers(0, 2**16), max_size=8))
def test_channels(case, ends):
    text, expected = case
    parser = AnswerParser(ChannelParser(), CallParser(SYNTAXES["gpt_oss"], NAMES))
    *some, last = cut(text, ends)
    news = [parser.push(piece, [], ended=False) for piece in some]
    news.append(parser.push(last, [], ended=True))
    reasoning = "".join(part.reasoning for part in news)
    content = "".join(part.content for part in news)
    calls = [call.name for part in news for call in part.tool_calls if call.begins]
    assert (reasoning, content, calls) == expected


@given(
    st.lists(st.sampled_from([*Channels.special, "analysis", "a", "to=functions.now"])),
    st.lists(st.integers(0, 2**16), max_size=8),
)
def test_any_channels_are_read_and_pieces_do_not_matter(parts, ends):
    def read(*pieces):
        parser = ChannelParser()
        news = [*map(parser.push, pieces), parser.finish()]
        return "".join(r for r, _ in news), "".join(rest for _, rest in news)

    text = "".join(parts)
    assert read(*cut(text, ends)) == read(text)
