"""GGUF files to write of the tiny models, which llama.cpp was asked about too."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import with_tokenizer

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
    "granite": "granite",
    "olmo2": "olmo2",
}
"""Folders of safetensors, by the name of the GGUF fixture with the same weights, where
there is one."""

K_QUANTS = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "IQ4_XS")
IDS = [1, 70, 75, 82, 82, 85, 2, 1, 100, 40, 41, 42, 43, 200, 201, 255]
"""What llama.cpp's logits are for."""


def folder_of(name: str, scratch: Path) -> Path:
    """A model of `TWINS` with a tokenizer."""
    base, _, variant = TWINS[name].partition("/")
    folder = with_tokenizer(base, scratch / name)
    if variant:
        shutil.copy(FIXTURES / base / variant / "config.json", folder / "config.json")
    return folder


def sources(scratch: Path) -> dict[str, tuple[Path, str]]:
    """What is quantised, and to what, by case."""
    cases = {name: (folder_of(name, scratch), "gguf:F32") for name in TWINS}
    k_quants = FIXTURES / "gguf" / "llama-q4_k_m.gguf"
    return cases | {kind: (k_quants, f"gguf:{kind}") for kind in K_QUANTS}
