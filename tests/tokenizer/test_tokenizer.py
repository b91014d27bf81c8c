from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from llmjax.errors import InvalidRequestError

from .conftest import fixture, small


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", "x" * 1000 + "\udfffy"])
def test_half_surrogates_are_refused(name, text):
    with pytest.raises(InvalidRequestError, match=r"half a surrogate pair \(U\+D[8CF]"):
        small(name).encode(text)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InvalidRequestError, match=r"text is .* allowed: a string"):
        small("byte-level").encode(text)


def test_text_of_one_token():
    tokenizer = small("byte-level")
    token_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    assert tokenizer.token_text(token_ids[b" the"]) == " the"
    assert tokenizer.token_text(token_ids[b"\xf0"]) == "\ufffd"
    assert tokenizer.token_text(0) == "<|end_of_text|>"


def test_one_bos_in_raw_text():
    tokenizer = small("sentencepiece")
    bos, *ids = tokenizer.encode("a")
    assert bos == tokenizer.bos_token_id
    assert tokenizer.encode("<s>a") == [bos, *ids]
    assert tokenizer.encode("<s><s>a") == [bos, bos, *ids]  # the writer's own two
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_threads_share_a_tokenizer():
    case = fixture("llamacpp")["sentencepiece"]
    tokenizer = small("sentencepiece", add_bos_token=True)
    alone = [tokenizer.decode(ids) for ids in case["ids"]]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert [*pool.map(tokenizer.encode, case["texts"])] == case["ids"]
            assert [*pool.map(tokenizer.decode, case["ids"])] == alone


def test_a_gap_to_fill():
    tokenizer = small("byte-level")
    with pytest.raises(InvalidRequestError, match="no fill-in-the-middle tokens") as caught:
        tokenizer.encode_infill("a", "b")
    assert caught.value.param == "suffix"
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    tokenizer.backend.add_special_tokens(names)
    before, after, middle = map(tokenizer.backend.token_to_id, names)
    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in ("a b", " c"))
    gap = [before, *a, after, *b, middle]
    assert tokenizer.encode_infill("a b", " c") == gap
    tokenizer = small("byte-level", add_bos_token=True)
    tokenizer.backend.add_special_tokens(names)
    assert tokenizer.encode_infill("a b", " c") == [tokenizer.bos_token_id, *gap]
    assert tokenizer.encode_infill("a b", " c", add_special_tokens=False) == gap
