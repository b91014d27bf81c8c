"""Small vocabularies of each kind, as GGUF metadata, trained on WikiText-2 and odd texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizer_texts import texts
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SPACE = "\u2581"


def _train(model: Any, trainer: Any, corpus: Path, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    prose = corpus.read_text(encoding="utf-8").replace("<unk>", "")[:400_000].splitlines()
    tokenizer.train_from_iterator([*prose, *texts([], 3000, seed=1)], trainer)
    return tokenizer


def _in_order(tokenizer: Tokenizer) -> list[str]:
    return sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)


def byte_level(corpus: Path) -> dict[str, Any]:
    """Merges reach over words, so that ids tell where a pre-tokenizer has cut."""
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=8,
        show_progress=False,
    )
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _train(models.BPE(), trainer, corpus, pre_tokenizer=cut)
    tokens = [*_in_order(tokenizer), "<think>", "  x", "<｜tool▁call｜>"]
    merges = [a + " " + b for a, b in _state(tokenizer)["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 6) + [4, 4, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece(corpus: Path) -> dict[str, Any]:
    trainer = trainers.BpeTrainer(
        vocab_size=800, limit_alphabet=90, max_token_length=8, show_progress=False
    )
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer = _train(models.BPE(), trainer, corpus, normalizer=spaces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    head = len(tokens)
    added = ["<|user|>", "\n\n"]
    learned = [token for token in _in_order(tokenizer) if token not in [*tokens, *added]]
    pieces = sorted(learned, key=lambda token: len(token) == 1)  # merges first, then characters
    scores = [0.0] * head + [-float(i) for i in range(len(pieces))]
    tokens += [*pieces, *added]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*scores, -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def wordpiece(corpus: Path) -> dict[str, Any]:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=800, limit_alphabet=90, special_tokens=special, show_progress=False
    )
    tokenizer = _train(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        corpus,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    tokens = [
        t if t in special else t[2:] if t.startswith("##") else SPACE + t
        for t in _in_order(tokenizer)
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


def _state(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())["model"]
