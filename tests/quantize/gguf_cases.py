"""GGUF files to write of the tiny models, which llama.cpp was asked about too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"

TWINS = {
    "llama3": "llama3",
    "llama2": "llama2",
    "smollm2": "smollm2",
    "llama_yarn": "rope/yarn",
    "mistral": "mistral/full",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2/head_scalar",
    "gemma3": "gemma3/linear",
    "phi3": "phi3/longrope_partial",
    "phi3-plain": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""Folders of safetensors, by the name of the GGUF fixture with the same weights, where
there is one."""

K_QUANTS = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "IQ4_XS")
IDS = [1, 70, 75, 82, 82, 85, 2, 1, 100, 40, 41, 42, 43, 200, 201, 255]
"""What llama.cpp's logits are for."""


def folder_of(name: str, scratch: Path) -> Path:
    """A model of `TWINS`, with a tokenizer of as many ids: bytes, and a merge of two of them."""
    base, _, variant = TWINS[name].partition("/")
    folder = scratch / name / "model"  # llama.cpp expects more of what calls itself phi3
    shutil.copytree(FIXTURES / base, folder)
    if variant:
        shutil.copy(FIXTURES / base / variant / "config.json", folder / "config.json")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 4]
    vocab = {token: i for i, token in enumerate([*special, *alphabet, "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


ASKED = tuple(name for name in TWINS if name != "phi3")
"""Where llama.cpp computes the same: its longrope goes by the room for a text, not by the text."""


def sources(scratch: Path) -> dict[str, tuple[Path, str]]:
    """What is quantised, and to what, by case."""
    cases = {name: (folder_of(name, scratch), "gguf:F32") for name in ASKED}
    k_quants = FIXTURES / "gguf" / "llama-q4_k_m.gguf"
    return cases | {kind: (k_quants, f"gguf:{kind}") for kind in K_QUANTS}
