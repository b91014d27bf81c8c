"""The end of a reasoning is written where its budget is used up, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.structured.constraint import Constraint
from llmjax.structured.thinking import ThinkingBudget
from llmjax.structured_outputs import Reasoning
from llmjax.tokenizer import tokenizer_from_folder

END = "</think>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return tokenizer_from_folder(tiny_model)


def write(tokenizer, wanted: str, budget: int, *, is_open: bool) -> str:
    """What a model comes to say that goes on with `wanted` wherever it has a choice."""
    tags = Reasoning("<think>", END, is_open)
    constraint = Constraint(thinking=ThinkingBudget(tags, budget, tokenizer).start())
    said, left = [], tokenizer.encode(wanted, add_special_tokens=False)
    while left or constraint.forced:
        if constraint.forced:
            token = constraint.forced[0]
            del left[: int(left[:1] == [token])]  # it would have said the same
        else:
            token = left.pop(0)
        said.append(token)
        constraint.accept(token)
    return tokenizer.decode(said)


@pytest.mark.parametrize(
    ("is_open", "budget", "wanted", "said"),
    [
        (True, 3, "abcdef", "abc</think>def"),
        (True, 0, "abc", "</think>abc"),
        (True, 9, "ab</think>cdefghijkl", "ab</think>cdefghijkl"),
        # Begun by the model itself, and finished for it.
        (True, 4, "ab</ is", "ab</think> is"),
        (True, 2, "a<</think>b", "a</think></think>b"),
        (True, 2, "aéb", "aé</think>b"),
        (True, 1, "\U0001f600b", "\U0001f600</think>b"),
        (False, 3, "<think>abcdef", "<think>abc</think>def"),
        (False, 0, " \n<think>abc", " \n<think></think>abc"),
        (False, 2, "ab<think>cdef", "ab<think>cdef"),
        (False, 2, "<thinker>", "<thinker>"),
        (False, 1, "<think>a</think><think>bcd", "<think>a</think><think>bcd"),
    ],
)
def test_where_the_budget_ends(tokenizer, is_open, budget, wanted, said):
    assert write(tokenizer, wanted, budget, is_open=is_open) == said


@given(
    st.booleans(),
    st.integers(0, 12),
    st.lists(st.sampled_from(["<think>", END, "</thi", " ", "\n", "a", "<"]), max_size=12),
)
def test_not_a_token_more_nor_less(tokenizer, is_open, budget, parts):
    """A token is a character here."""
    wanted = "".join(parts)
    said = write(tokenizer, wanted, budget, is_open=is_open)
    assert write(tokenizer, wanted, 1000, is_open=is_open) == wanted
    opening = 0 if is_open else len(wanted) - len(wanted.lstrip()) + len("<think>")
    if not wanted[:opening].endswith("" if is_open else "<think>"):
        assert said == wanted  # it does not think
        return
    thought, _, answer = wanted[opening:].partition(END)
    # At the end of its budget what looks like the beginning of the tag is one.
    begun = any(thought.endswith(END[:n]) for n in range(1, len(END)))
    if END in wanted[opening:] and len(thought) <= budget - begun:
        assert said == wanted
    elif len(thought) < budget:
        assert said == wanted  # and has not come so far
    else:
        head = wanted[: opening + budget]
        assert said.startswith(head)
        tag = said.index(END, opening)
        # What it had begun to write of the tag itself stays a part of it.
        assert len(head) - len(END) < tag <= len(head)
        assert answer in said[tag + len(END) :]


def test_a_character_that_never_ends_is_not_waited_for(tokenizer):
    constraint = Constraint(
        thinking=ThinkingBudget(Reasoning("<think>", END, True), 1, tokenizer).start()
    )
    (lead,) = (i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    for _ in range(4):
        assert not constraint.forced
        constraint.accept(lead)
    assert tokenizer.decode(constraint.forced) == END
