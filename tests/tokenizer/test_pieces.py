from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from llmjax.errors import InvalidRequestError, UnsupportedModelError
from llmjax.tokenizer.pieces import BYTE_ALPHABET, Pieces

from .conftest import small


def spelled(name: str, text: str) -> bytes:
    tokenizer = small(name)
    return tokenizer.token_bytes(tokenizer.backend.token_to_id(text))


@pytest.mark.parametrize(
    ("name", "text", "data"),
    [
        ("byte-level", "Ġthe", b" the"),
        ("byte-level", "Ċ", b"\n"),
        ("byte-level", "ð", b"\xf0"),
        ("byte-level", "<|im_end|>", b"<|im_end|>"),
        ("byte-level", "  x", b"  x"),
        ("byte-level", "<｜tool▁call｜>", "<｜tool▁call｜>".encode()),
        ("sentencepiece", "▁the", b" the"),
        ("sentencepiece", "<0x0A>", b"\n"),
        ("sentencepiece", "<0xE4>", b"\xe4"),
        ("sentencepiece", "</s>", b"</s>"),
        ("sentencepiece", "\n\n", b"\n\n"),
        ("wordpiece", "the", b" the"),
        ("wordpiece", "##s", b"s"),
    ],
)
def test_bytes_are_exact(name, text, data):
    assert spelled(name, text) == data


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_tokens_join_to_the_text(name):
    tokenizer = small(name)
    text = "a naïve 中文 🙂 text\n\twith  spaces"
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, False)))
    assert joined.decode().removeprefix(" ") == text


def test_alphabet_is_that_of_the_library():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(BYTE_ALPHABET) == set(ByteLevel.alphabet())
    assert sorted(BYTE_ALPHABET.values()) == [*range(256)]


def test_added_tokens_are_not_in_the_alphabet():
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["über"])
    assert Pieces(backend)(1) == "über".encode()


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**64])
def test_impossible_ids(token_id):
    with pytest.raises(InvalidRequestError, match=f"token id {token_id}"):
        small("byte-level").decode([token_id])


def test_absent_ids():
    tokenizer = small("byte-level")
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("a")]) == "a"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Replace(Regex("a+"), " "),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
)
def test_decoders_that_need_the_whole_text(decoder):
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match="decoder"):
        Pieces(backend)
