"""Tokenizers written as GGUF metadata are read back as what they were."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from llmjax.errors import UnsupportedModelError
from llmjax.tokenizer import Tokenizer as OurTokenizer
from llmjax.tokenizer import (
    gguf_tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
    write_tokenizer,
)
from llmjax.tokenizer.pre_tokenizers import PRE_TOKENIZERS, name_of

from .conftest import fixture, small

TEXTS = sorted({text for case in fixture("llamacpp").values() for text in case["texts"]})
NAMES = ["llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "gpt-4o", "deepseek-v3", "falcon"]


def same_ids(one: OurTokenizer, other: OurTokenizer) -> None:
    for text in TEXTS:
        assert other.encode(text) == one.encode(text), text


def round_trip(tokenizer: OurTokenizer) -> tuple[OurTokenizer, dict]:
    metadata = gguf_tokenizer(tokenizer, tokenizer.vocab_size)
    return tokenizer_from_gguf(metadata), metadata


@pytest.mark.parametrize("pre", NAMES)
def test_byte_level(pre):
    tokenizer = small("byte-level", pre=pre)
    found, metadata = round_trip(tokenizer)
    same_ids(tokenizer, found)
    cut = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    assert cut.patterns == PRE_TOKENIZERS[pre].patterns
    assert found.special_ids == tokenizer.special_ids


@pytest.mark.parametrize("changes", [{}, {"add_space_prefix": False}, {"add_eos_token": True}])
def test_sentencepiece(changes):
    tokenizer = small("sentencepiece", **changes)
    found, metadata = round_trip(tokenizer)
    same_ids(tokenizer, found)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert found.eos_token_ids == tokenizer.eos_token_ids
    assert (found.prefix, found.suffix) == (tokenizer.prefix, tokenizer.suffix)


@pytest.mark.parametrize("vocabulary", ["byte-level", "sentencepiece"])
def test_by_way_of_a_folder(vocabulary, tmp_path):
    tokenizer = small(vocabulary)
    write_tokenizer(tokenizer, tmp_path)
    found, _ = round_trip(tokenizer_from_folder(tmp_path))
    same_ids(tokenizer, found)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_names_cut_as_the_patterns_that_they_are_written_for(name):
    cut = PRE_TOKENIZERS[name]
    written = name_of(cut.patterns, cut.ignore_merges)
    assert PRE_TOKENIZERS[written].patterns == cut.patterns


def byte_level(
    merges: tuple[tuple[str, str], ...] = (("h", "e"),), **parts: object
) -> OurTokenizer:
    """255 bytes and "he", with an added token of each kind."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:255], "he"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<|over|>")])
    backend.add_tokens(["<tool>"])
    templates = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return OurTokenizer(
        backend,
        bos_token_id=256,
        eos_token_ids=[257, 258],
        prefix=[256],
        chat_templates=templates,
        template_variables=names,
    )


def test_what_stands_beside_the_vocabulary():
    tokenizer = byte_level()
    metadata = gguf_tokenizer(tokenizer, 262)
    assert metadata["tokenizer.ggml.tokens"][256:] == [
        *("<s>", "</s>", "<|over|>", "<tool>"),
        *("[PAD260]", "[PAD261]"),
    ]
    assert metadata["tokenizer.ggml.token_type"][255:] == [1, 3, 3, 3, 4, 5, 5]
    ids = {name: metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot")}
    assert ids == {"bos": 256, "eos": 257, "eot": 258}
    assert metadata["tokenizer.ggml.add_bos_token"] and not metadata["tokenizer.ggml.add_eos_token"]
    assert metadata["tokenizer.chat_template"] == "{{ 1 }}"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    found = tokenizer_from_gguf(metadata)
    assert found.chat_templates == tokenizer.chat_templates
    assert found.eos_token_ids == tokenizer.eos_token_ids


def test_ids_without_a_row_are_left_out():
    metadata = gguf_tokenizer(byte_level(), 258)
    assert len(metadata["tokenizer.ggml.tokens"]) == 258
    assert "tokenizer.ggml.eot_token_id" not in metadata


def test_ends_that_have_no_place_are_told(caplog):
    tokenizer = byte_level()
    tokenizer.eos_token_ids |= {65, 66, 67}
    gguf_tokenizer(tokenizer, 260)
    assert "no room for these ids that end a generation: [67, 258]" in caplog.text


def test_spaces_that_belong_to_tokens_are_told(caplog):
    tokenizer = byte_level()
    tokenizer.backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    gguf_tokenizer(tokenizer, 261)
    assert "spaces beside these tokens are their own: <|end|>" in caplog.text


def word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))


def characters(**parts: object) -> Tokenizer:
    backend = Tokenizer(models.BPE({"a": 0, "\u2581": 1, "<unk>": 2}, [], unk_token="<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (OurTokenizer(word_level()), "its model is WordLevel, allowed: BPE"),
        (OurTokenizer(characters()), "neither over bytes nor with bytes to fall back on"),
        (byte_level(merges=()), "it has no merges, without which llama.cpp"),
        (byte_level(normalizer=normalizers.Lowercase()), "it normalises by Lowercase, allowed"),
        (
            byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "it cuts text by {'type': 'ByteLevel', 'add_prefix_space': True",
        ),
        (
            byte_level(
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)]
                )
            ),
            "no tokenizer.ggml.pre is known that cuts text by",
        ),
        (
            OurTokenizer(byte_level().backend, bos_token_id=256, prefix=[256, 257]),
            r"texts begin with the ids \[256, 257\]",
        ),
    ],
)
def test_what_the_format_cannot_say_is_refused(tokenizer, why):
    with pytest.raises(UnsupportedModelError, match="the tokenizer cannot be written as GGUF"):
        gguf_tokenizer(tokenizer, 300)
    with pytest.raises(UnsupportedModelError, match=why):
        gguf_tokenizer(tokenizer, 300)
