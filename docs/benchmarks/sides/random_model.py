"""A small random Llama for all servers: safetensors with a tokenizer, and the same as GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

D, F, H, N, L, CONTEXT = 64, 128, 32, 2, 2, 1024
SPECIAL = ["<pad>", "<s>", "</s>"]
# GGUF's reader wants a merge.
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
V = len(TOKENS)
EPS, THETA = 1e-5, 10000.0
TOP = {
    "model.embed_tokens": ("token_embd", (V, D)),
    "model.norm": ("output_norm", (D,)),
    "lm_head": ("output", (V, D)),
}
LAYER = {
    "input_layernorm": ("attn_norm", (D,)),
    "post_attention_layernorm": ("ffn_norm", (D,)),
    "self_attn.q_proj": ("attn_q", (N * H, D)),
    "self_attn.k_proj": ("attn_k", (N * H, D)),
    "self_attn.v_proj": ("attn_v", (N * H, D)),
    "self_attn.o_proj": ("attn_output", (D, N * H)),
    "mlp.gate_proj": ("ffn_gate", (F, D)),
    "mlp.up_proj": ("ffn_up", (F, D)),
    "mlp.down_proj": ("ffn_down", (D, F)),
}
"""By Hugging Face's name: GGUF's, and the shape."""


def write(folder: Path) -> tuple[Path, Path]:
    """The folder of safetensors, and the GGUF file."""
    names = {f"{name}.weight": (f"{ours}.weight", shape) for name, (ours, shape) in TOP.items()}
    for i in range(L):
        for name, (ours, shape) in LAYER.items():
            names[f"model.layers.{i}.{name}.weight"] = f"blk.{i}.{ours}.weight", shape
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape) * 0.05).astype(np.float32)
        for name, (_, shape) in names.items()
    }
    hub = folder / "random"
    hub.mkdir(parents=True)
    write_hub(hub, tensors)
    file = folder / "random.gguf"
    write_gguf(file, {names[name][0]: _rotary(name, value) for name, value in tensors.items()})
    return hub, file


def write_hub(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": N,
        "num_key_value_heads": N,
        "head_dim": H,
        "num_hidden_layers": L,
        "vocab_size": V,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    settings |= {"eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_gguf(file: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(L)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(N)
    writer.add_key_length(H)
    writer.add_rope_dimension_count(H)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (V - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rotary(name: str, value: np.ndarray) -> np.ndarray:
    """GGUF has rotary pairs side by side."""
    if "q_proj" not in name and "k_proj" not in name:
        return value
    halves = value.reshape(N, 2, H // 2, D)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
