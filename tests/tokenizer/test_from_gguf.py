from __future__ import annotations

import pytest

from llmjax.errors import CheckpointFormatError, UnsupportedModelError
from llmjax.tokenizer import tokenizer_from_gguf

from .conftest import fixture, small, small_metadata

NONE = 2**32 - 1


def renamed(vocabulary: str, texts: dict[int, str], **entries):
    """The vocabulary with other texts for some ids (-1 is the last), and other entries."""
    metadata = small_metadata(vocabulary)
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    for token_id, text in texts.items():
        tokens[token_id] = text
    changed = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return tokenizer_from_gguf(metadata | {"tokenizer.ggml.tokens": tokens} | changed)


@pytest.mark.parametrize("model", ["t5", "rwkv", "no_vocab", None])
def test_unknown_model(model):
    with pytest.raises(UnsupportedModelError, match=f"{model!r}; supported: gpt2, llama, bert"):
        tokenizer_from_gguf({"tokenizer.ggml.model": model} if model else {})


def test_unknown_pre_tokenizer():
    with pytest.raises(UnsupportedModelError, match=r"'brand-new'; supported: .*qwen2"):
        small("byte-level", pre="brand-new")


def test_missing_pre_tokenizer_warns(caplog):
    metadata = small_metadata("byte-level")
    del metadata["tokenizer.ggml.pre"]
    assert tokenizer_from_gguf(metadata).encode("a") == small("byte-level").encode("a")
    assert "names no pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("vocabulary", "entries", "message"),
    [
        ("byte-level", {"tokens": []}, "tokens is missing"),
        ("byte-level", {"tokens": ["a", "a"]}, "lists a token twice"),
        ("byte-level", {"token_type": [1]}, "token_type has 1 entries for"),
        ("byte-level", {"merges": ["Ġt"]}, "has 'Ġt', not two parts"),
        ("byte-level", {"merges": ["q qq"]}, "broken: .*qq"),
        ("sentencepiece", {"scores": []}, "scores is missing"),
        ("byte-level", {"add_bos_token": True, "bos_token_id": NONE}, "bos_token_id is missing"),
        ("byte-level", {"add_eos_token": True, "eos_token_id": NONE}, "eos_token_id is missing"),
    ],
)
def test_contradictions(vocabulary, entries, message):
    ours = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    with pytest.raises(CheckpointFormatError, match=message):
        tokenizer_from_gguf(small_metadata(vocabulary) | ours)


def test_ids_out_of_range_are_none():
    tokenizer = small("byte-level", bos_token_id=NONE, eos_token_id=NONE)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("a") == small("byte-level").encode("a", False)


def test_every_declared_end():
    tokenizer = small("byte-level", eos_token_id=10, eot_token_id=11, eom_token_id=12)
    assert tokenizer.eos_token_ids == {10, 11, 12, 0, 2}  # and <|end_of_text|>, <|im_end|>


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        ({}, {2}),
        ({-2: "<|eot_id|>"}, {2, -2}),
        ({-2: "<|end|>"}, {2, -2}),
        ({-2: "<|end|>", -3: "<|return|>", -4: "<|call|>"}, {2, -3, -4}),
        ({-2: "<|end|>", -3: "<|flush|>", -4: "<|calls|>"}, {2, -3, -4}),
        ({-2: "<|tool_response>"}, {-2}),
        ({-2: "<end_of_turn>"}, {2, -2}),
        ({-5: "<|im_end|>"}, {2, -5}),  # declared as an ordinary token
        ({2: "x</s>", -5: "</s>"}, {}),  # an ordinary token that is a tag of HTML
    ],
)
def test_ends_by_text(texts, ends):
    metadata = small_metadata("sentencepiece")
    size = len(metadata["tokenizer.ggml.tokens"])
    types = [*metadata["tokenizer.ggml.token_type"]]
    types[-5:] = [1, 4, 4, 3, 3]
    tokenizer = renamed("sentencepiece", texts, token_type=types, eos_token_id=NONE)
    declared = {2}  # what llama.cpp assumes of SentencePiece vocabularies
    assert tokenizer.eos_token_ids == {end % size for end in ends} | declared
    assert tokenizer.eos_token_ids <= tokenizer.special_ids


def test_fill_in_the_middle_marks_end_too():
    tokens = fixture("smollm2")["tokenizer.ggml.tokens"]
    ends = tokenizer_from_gguf(fixture("smollm2")).eos_token_ids
    assert {tokens[i] for i in ends} == {"<|im_end|>", "<|endoftext|>", "<reponame>"}


def test_token_types():
    tokenizer = small("byte-level")
    texts = {t.content: t for t in tokenizer.backend.get_added_tokens_decoder().values()}
    assert {text for text, token in texts.items() if not token.special} == {"<think>", "  x"}
    ids = tokenizer.encode("<|im_start|>a<think>  x")
    assert tokenizer.decode(ids) == "a<think>  x"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>  x"


def test_empty_tokens_have_a_name():
    tokenizer = renamed("byte-level", {-1: ""})
    last = tokenizer.vocab_size - 1
    assert tokenizer.backend.id_to_token(last) == f"[EMPTY_{last}]"


def test_merges_by_score_prefer_the_better_token():
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 6,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    for scores, ids in (((-1, -2, -9), [6, 5]), ((-2, -1, -9), [3, 7])):
        scored = metadata | {"tokenizer.ggml.scores": [0.0] * 6 + [*scores]}
        pieces = tokenizer_from_gguf(scored | {"tokenizer.ggml.tokens": [*tokens[:8], "zzz"]})
        assert pieces.encode("abc") == ids
        assert tokenizer_from_gguf(scored).encode("abc") == [8]


def test_merges_in_the_file_come_first():
    tokenizer = small("sentencepiece", merges=("a n",))
    assert len(tokenizer.encode("an and", False)) == len(["▁", "an", "▁", "an", "d"])


def test_phi3_swallows_spaces_after_marks():
    metadata = small_metadata("sentencepiece")
    plain = tokenizer_from_gguf(metadata).encode("<|user|>  \n a")
    phi3 = tokenizer_from_gguf(metadata | {"general.name": "Phi-3 mini 4k"})
    assert phi3.encode("<|user|>  \n a") == phi3.encode("<|user|>a") != plain


def test_wordpiece_lowercases_unless_told():
    assert small("wordpiece").encode("The") == small("wordpiece").encode("the")
    cased = {"normalizer.lowercase": False}
    assert small("wordpiece", **cased).encode("The") != small("wordpiece", **cased).encode("the")
    assert small("wordpiece").encode("é") == small("wordpiece").encode("e")
    kept = {"normalizer.strip_accents": False}
    assert small("wordpiece", **kept).encode("é") != small("wordpiece", **kept).encode("e")
