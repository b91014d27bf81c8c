from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from llmjax.errors import CheckpointFormatError, ModelNotFoundError, UnsupportedModelError
from llmjax.tokenizer import tokenizer_from_folder

WORDS = ["<unk>", "<s>", "</s>", "<|eot|>", "<|eom|>", "a", "b", "c", "<extra>", "<tool>"]
BOS, EOS, EOT, EOM, A, B = 1, 2, 3, 4, 5, 6


def template(single: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=single, pair=None, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )


@pytest.fixture
def folder(tmp_path):
    """Writes a folder; content by file name, a `tokenizers` post-processor by keyword."""

    def write(files: dict[str, object], post: processors.PostProcessor | None = None) -> Path:
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.decoder = decoders.WordPiece()
        backend.add_special_tokens(["<s>", "</s>"])
        backend.enable_truncation(2)
        backend.enable_padding(length=8)
        if post:
            backend.post_processor = post
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


def config(**entries: object) -> dict[str, object]:
    return {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", **entries}}


@pytest.mark.parametrize(
    ("entries", "post", "ids"),
    [
        ({}, None, [A]),
        ({}, template("<s> $A"), [BOS, A]),
        ({}, template("<s> $A </s>"), [BOS, A, EOS]),
        ({}, template("$A </s>"), [A, EOS]),
        ({}, processors.ByteLevel(), [A]),
        ({}, processors.Sequence([processors.ByteLevel(), template("<s> $A")]), [BOS, A]),
        ({}, processors.BertProcessing(("</s>", EOS), ("<s>", BOS)), [BOS, A, EOS]),
        ({}, processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS)), [BOS, A, EOS]),
        ({"add_bos_token": True}, None, [BOS, A]),
        ({"add_bos_token": True, "add_eos_token": True}, None, [BOS, A, EOS]),
        ({"add_bos_token": False}, template("<s> $A </s>"), [A]),
        ({"add_bos_token": True, "bos_token": None}, None, [A]),
    ],
)
def test_affixes(folder, entries, post, ids):
    tokenizer = tokenizer_from_folder(folder(config(**entries), post))
    assert tokenizer.encode("a") == ids
    assert tokenizer.encode("a", add_special_tokens=False) == [A]


def test_one_bos(folder):
    tokenizer = tokenizer_from_folder(folder(config(), template("<s> $A")))
    assert tokenizer.encode("<s> a") == tokenizer.encode("a") == [BOS, A]
    assert tokenizer.encode("") == [BOS]


def test_no_truncation_and_no_padding(folder):
    tokenizer = tokenizer_from_folder(folder({}))
    assert tokenizer.encode("a b a b") == [A, B, A, B]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, set()),
        (config(), {EOS}),
        (config(eos_token={"content": "<|eot|>", "special": True}), {EOT}),
        ({"generation_config.json": {"eos_token_id": EOT}}, {EOT}),
        ({**config(), "generation_config.json": {"eos_token_id": [EOT, EOM]}}, {EOS, EOT, EOM}),
        ({**config(), "config.json": {"eos_token_id": EOM}}, {EOS, EOM}),
        ({"config.json": {"text_config": {"eos_token_id": [EOT]}}}, {EOT}),
        ({"special_tokens_map.json": {"eos_token": "<|eom|>"}}, {EOM}),
        ({**config(), "special_tokens_map.json": {"eos_token": "<|eom|>"}}, {EOS, EOM}),
        ({**config(), "generation_config.json": {"eos_token_id": None}}, {EOS}),
    ],
)
def test_every_declared_end(folder, files, ids):
    assert tokenizer_from_folder(folder(files)).eos_token_ids == ids


def test_declared_tokens(folder):
    added = {
        "9": {"content": "<tool>", "special": False, "lstrip": True},
        "10": {"content": "<new>", "special": True},
    }
    entries = {"added_tokens_decoder": added, "additional_special_tokens": ["<extra>"]}
    tokenizer = tokenizer_from_folder(folder(config(**entries, unk_token="<unk>")))
    assert tokenizer.vocab_size == 11
    assert tokenizer.special_ids == {0, BOS, EOS, 8, 10}
    assert tokenizer.encode("a<extra>b <tool><new>") == [A, 8, B, 9, 10]
    assert tokenizer.backend.get_added_tokens_decoder()[9] == AddedToken("<tool>", lstrip=True)
    assert tokenizer.decode([A, 8, 9, 10]) == "a <tool>"


@pytest.mark.parametrize(
    ("files", "default", "tool_use"),
    [
        ({}, None, None),
        (config(chat_template="plain"), "plain", "plain"),
        (
            config(
                chat_template=[
                    {"name": "default", "template": "first"},
                    {"name": "tool_use", "template": "tools"},
                ]
            ),
            "first",
            "tools",
        ),
        ({**config(chat_template="plain"), "chat_template.jinja": "file"}, "file", "file"),
        ({"chat_template.json": {"chat_template": "json"}}, "json", "json"),
        (
            {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "more"},
            "file",
            "more",
        ),
    ],
)
def test_chat_templates(folder, files, default, tool_use):
    tokenizer = tokenizer_from_folder(folder(files))
    assert tokenizer.chat_template == default
    if default:
        user = [{"role": "user", "content": "a"}]
        assert tokenizer.render_chat(user) == default
        assert tokenizer.render_chat(user, tools=[{}]) == tool_use


def test_template_sees_named_tokens(folder):
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ unk_token }}"
    entries = {"chat_template": source, "extra_special_tokens": {"image_token": "<extra>"}}
    tokenizer = tokenizer_from_folder(folder(config(**entries, pad_token=None)))
    assert tokenizer.render_chat([{"role": "user", "content": ""}]) == "<s></s><extra>"
    assert 8 in tokenizer.special_ids


def test_empty_folder(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_other_formats(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UnsupportedModelError, match=rf"{name} only; expected tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "<!DOCTYPE html>", "{}", '{"model": {"type": "BPE"'])
def test_broken_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("content", ["<!DOCTYPE html>", "[]"])
def test_broken_config(folder, content):
    path = folder({"tokenizer_config.json": content})
    with pytest.raises(CheckpointFormatError, match="tokenizer_config"):
        tokenizer_from_folder(path)
