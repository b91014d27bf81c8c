"""Growing text: what is pushed joins to what decode says, and nothing waits needlessly."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from llmjax.tokenizer import IncrementalDetokenizer, Tokenizer

from .conftest import small


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    texts = ["▁", "▁Hello", "wor", "ld", "##ing", "▁▁a", "!", " '", "n't", "é", "##."]
    backend = Backend(models.WordLevel({text: i for i, text in enumerate(texts)}, "!"))
    if decoder:
        backend.decoder = decoder
    backend.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<tool>")])
    return Tokenizer(backend)


VOCABULARIES = {
    "byte-level": small("byte-level"),
    "sentencepiece": small("sentencepiece"),
    "sentencepiece without prefix": small("sentencepiece", add_space_prefix=False),
    "wordpiece": small("wordpiece"),
    "metaspace": words(decoders.Metaspace()),
    "metaspace without prefix": words(decoders.Metaspace(prepend_scheme="never")),
    "wordpiece with clean-up": words(decoders.WordPiece()),
    "no decoder": words(None),
}
UNFINISHED = "\ufffd"

some = settings(max_examples=40, deadline=None)
each_vocabulary = pytest.mark.parametrize("name", VOCABULARIES)


@cache
def id_lists(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, single bytes often, and some that do not exist."""
    tokenizer = VOCABULARIES[name]
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) < 2]
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    return st.lists(st.sampled_from(single) | any_id if single else any_id)


@cache
def byte_ids(name: str) -> dict[int, int]:
    tokens = ((i, VOCABULARIES[name].token_bytes(i)) for i in range(VOCABULARIES[name].vocab_size))
    return {data[0]: i for i, data in tokens if len(data) == 1}


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return "".join([*(detokenizer.push([i]) for i in output), detokenizer.finish()])


@each_vocabulary
@some
@given(data=st.data(), skip=st.booleans())
def test_joins_to_decode(name, data, skip):
    tokenizer = VOCABULARIES[name]
    ids = data.draw(id_lists(name))
    assert stream(tokenizer, [], ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@each_vocabulary
@some
@given(data=st.data(), skip=st.booleans())
def test_follows_the_prompt(name, data, skip):
    tokenizer = VOCABULARIES[name]
    prompt, output = data.draw(id_lists(name)), data.draw(id_lists(name))
    text = stream(tokenizer, prompt, output, skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    both = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    completed = before.endswith(UNFINISHED) and both == before[:-1] + text
    assert both == before + text or completed


@each_vocabulary
@some
@given(data=st.data(), skip=st.booleans())
def test_equals_the_library(name, data, skip):
    tokenizer = VOCABULARIES[name]
    ids = data.draw(id_lists(name))
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    # The library's byte fallback gives up a whole run of bytes for one that is wrong.
    if "sentencepiece" not in name or UNFINISHED not in expected:
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@some
@given(st.binary(), st.binary())
def test_bytes_by_one_token_each(prompt, output):
    """As Python's decoder has it, which follows Unicode's advice on U+FFFD."""
    for name in ("byte-level", "sentencepiece without prefix"):
        tokenizer = VOCABULARIES[name]
        of_byte = byte_ids(name)
        ids = [of_byte[byte] for byte in prompt + output]
        whole = (prompt + output).decode(errors="replace")
        assert tokenizer.decode(ids) == whole
        text = stream(tokenizer, ids[: len(prompt)], ids[len(prompt) :], True)
        assert whole.endswith(text)


def pushes(data: bytes) -> list[str]:
    tokenizer = VOCABULARIES["sentencepiece"]
    first = tokenizer.backend.token_to_id("<0x00>")
    detokenizer = IncrementalDetokenizer(tokenizer, [tokenizer.backend.token_to_id("a")])
    return [*(detokenizer.push([first + byte]) for byte in data), detokenizer.finish()]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"\x80a", ["�", "a", ""]),  # a continuation byte alone
        (b"\xc0\x80a", ["�", "�", "a", ""]),  # an overlong zero
        (b"\xed\xa0\x80a", ["", "", "���", "a", ""]),  # half a surrogate pair
        (b"\xf0\x9f\x99\x82!", ["", "", "", "🙂", "!", ""]),
        (b"\xf0\x9fa", ["", "", "�a", ""]),
        (b"\xe4\xbd", ["", "", "�"]),
        (b"\xff\xfe", ["�", "�", ""]),
    ],
)
def test_bad_bytes_do_not_hold_back_good_ones(data, parts):
    assert pushes(data) == parts


def test_prompt_ending_within_a_character():
    tokenizer = VOCABULARIES["byte-level"]
    ids = [tokenizer.backend.token_to_id(char) for char in "ðŁĻĤ!"]
    assert tokenizer.decode(ids) == "🙂!"
    assert stream(tokenizer, ids[:2], ids[2:], True) == "🙂!"
    bang = tokenizer.encode("!")
    assert stream(tokenizer, ids[:2], bang, True) == "!"
    assert stream(tokenizer, ids[:2], [], True) == ""


def test_leading_space_depends_on_the_prompt():
    tokenizer = VOCABULARIES["sentencepiece"]
    the, bos, user = (tokenizer.backend.token_to_id(t) for t in ("▁the", "<s>", "<|user|>"))
    assert stream(tokenizer, [], [the], True) == "the"
    assert stream(tokenizer, [bos], [the], True) == "the"
    assert stream(tokenizer, [bos], [the], False) == " the"
    assert stream(tokenizer, [the], [the], True) == " the"
    assert stream(tokenizer, [bos, user, the], [the], True) == " the"


def test_prompt_is_not_spelled_out(monkeypatch):
    tokenizer = VOCABULARIES["sentencepiece"]
    calls = []
    original = tokenizer.pieces.__call__
    monkeypatch.setattr(
        type(tokenizer.pieces), "__call__", lambda _, *a: calls.append(a) or original(*a)
    )
    prompt = [tokenizer.backend.token_to_id("▁the")] * 10_000
    IncrementalDetokenizer(tokenizer, prompt)
    assert len(calls) < 10
