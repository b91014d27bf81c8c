"""Writes tiny models to disk: a two-layer Llama with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers

HIDDEN, MLP, HEADS, HEAD_DIM, LAYERS = 64, 96, 8, 8, 2
TOKENS = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
TOKENS += [f"<unused{i}>" for i in range(264 - len(TOKENS))]
VOCAB = len(TOKENS)
TINY_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_TOP = {
    "model.embed_tokens": ("embed", "token_embd", (VOCAB, HIDDEN)),
    "model.norm": ("norm", "output_norm", (HIDDEN,)),
    "lm_head": ("head", "output", (VOCAB, HIDDEN)),
}
_LAYER = {
    "input_layernorm": ("attn_norm", "attn_norm", (HIDDEN,)),
    "post_attention_layernorm": ("mlp_norm", "ffn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn.q", "attn_q", (HIDDEN, HIDDEN)),
    "self_attn.k_proj": ("attn.k", "attn_k", (HIDDEN, HIDDEN)),
    "self_attn.v_proj": ("attn.v", "attn_v", (HIDDEN, HIDDEN)),
    "self_attn.o_proj": ("attn.o", "attn_output", (HIDDEN, HIDDEN)),
    "mlp.gate_proj": ("mlp.gate", "ffn_gate", (MLP, HIDDEN)),
    "mlp.up_proj": ("mlp.up", "ffn_up", (MLP, HIDDEN)),
    "mlp.down_proj": ("mlp.down", "ffn_down", (HIDDEN, MLP)),
}
"""By Hugging Face name: the decoder's path, GGUF's name, the shape."""


def _names() -> dict[str, tuple[str, str, tuple[int, ...]]]:
    names = {f"{hf}.weight": (f"{p}.weight", f"{g}.weight", s) for hf, (p, g, s) in _TOP.items()}
    for i in range(LAYERS):
        for hf, (path, name, shape) in _LAYER.items():
            places = (f"layers.{i}.{path}.weight", f"blk.{i}.{name}.weight", shape)
            names[f"model.layers.{i}.{hf}.weight"] = places
    return names


NAMES = _names()


def hf_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(np.float32) for n, (_, _, shape) in NAMES.items()}


def parameters(tensors: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The same by the decoder's paths."""
    return {NAMES[n][0]: v for n, v in (hf_tensors() if tensors is None else tensors).items()}


def gguf_tensors(tensors: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The same by GGUF's names, rotary pairs side by side as GGUF has them."""
    renamed = {}
    for name, value in (hf_tensors() if tensors is None else tensors).items():
        if "q_proj" in name or "k_proj" in name:
            halves = value.reshape(HEADS, 2, HEAD_DIM // 2, HIDDEN)
            value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        renamed[NAMES[name][1]] = value
    return renamed


def write_folder(
    folder: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
    **config: Any,
) -> Path:
    """A folder as the hub has them, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[s::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def new_writer(
    path: Path, *, mlp: int = MLP, tokens: Sequence[str] = TOKENS, **options: Any
) -> gguf.GGUFWriter:
    """A writer that has the tiny model's metadata; other tokens are a SentencePiece vocabulary."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    if tokens is TOKENS:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["a b"])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, tensors: dict[str, np.ndarray] | None = None, **options: Any) -> Path:
    """A GGUF file of float32 tensors, by default the whole tiny model."""
    writer = new_writer(path, **options)
    for name, value in (gguf_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, value)
    finish(writer)
    return path
