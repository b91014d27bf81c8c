"""Make tests/models/fixtures/gguf from the tiny safetensors models beside it.

    python tests/oracles/make_gguf.py          (gguf, torch, transformers)

Metadata keys and tensor changes are those of llama.cpp's converters: rotary rows of the
llama and granite architectures are interleaved, Gemma's norms have one added, llama3
scaling becomes rope_freqs.weight. Quantised models bring their own .npz: transformers'
answers for the dequantised weights.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from make_families import llama
from safetensors.torch import load_file, save_file
from tiny import FIXTURES, load, reference, write_config

OUT = FIXTURES / "gguf"
INTERLEAVED = ("llama", "granite")


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves to pairs."""
    halves = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def gguf_tensors(arch: str, config: dict, weights: dict) -> dict[str, np.ndarray]:
    """The checkpoint's tensors under GGUF's names, in GGUF's arrangement."""
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    out = {}
    for name, tensor in weights.items():
        w = tensor.float().numpy()
        if arch in INTERLEAVED and "q_proj" in name:
            w = interleave(w, config["num_attention_heads"])
        if arch in INTERLEAVED and "k_proj" in name:
            w = interleave(w, config["num_key_value_heads"])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            w = w + 1
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = w
    return out


def llama3_divisors(config: dict, scaling: dict) -> np.ndarray:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequency = 1.0 / config["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequency / (2 * math.pi)
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(turns > high, 1, np.where(turns < low, factor, between))
    return divisors.astype(np.float32)


def rope_tensors(config: dict) -> dict[str, np.ndarray]:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "llama3":
        return {"rope_freqs.weight": llama3_divisors(config, scaling)}
    if kind == "longrope":
        return {
            "rope_factors_long.weight": np.array(scaling["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(scaling["short_factor"], np.float32),
        }
    return {}


def add_rope(writer: gguf.GGUFWriter, arch: str, config: dict) -> None:
    writer.add_rope_freq_base(config["rope_theta"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if arch in ("llama", "granite"):
        writer.add_rope_dimension_count(head)
    if arch == "phi3":
        writer.add_rope_dimension_count(int(config.get("partial_rotary_factor", 1.0) * head))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        if kind:
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original))
            )
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def add_architecture(writer: gguf.GGUFWriter, arch: str, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if arch in ("llama", "granite"):
        writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    # converters write no rope base for Gemma 2, whose base is the default
    if arch != "gemma2":
        add_rope(writer, arch, config)


def add_tokenizer(writer: gguf.GGUFWriter, config: dict, folder: Path) -> None:
    """The folder's own vocabulary, else bytes after three control tokens."""
    path = folder / "tokenizer.json"
    if path.exists():
        model = json.loads(path.read_text())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        writer.add_chat_template(
            json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        )
    else:
        tokens = ["<pad>", "<s>", "</s>", *sorted(byte_alphabet())][: config["vocab_size"]]
        tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
        merges = ["a b"]
    control = [t.startswith("<") and len(t) > 1 for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if c else gguf.TokenType.NORMAL for c in control]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def write(name: str, arch: str, config: dict, tensors: dict, folder: Path, kind: Q) -> None:
    """`tensors` are float arrays to store as `kind` (vectors as F32), or (bytes, type)."""
    OUT.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
    add_architecture(writer, arch, config)
    add_tokenizer(writer, config, folder)
    for tensor, value in (tensors | rope_tensors(config)).items():
        if isinstance(value, tuple):
            writer.add_tensor(tensor, value[0], raw_dtype=value[1])
        elif kind == Q.F32 or value.ndim == 1:
            writer.add_tensor(tensor, np.ascontiguousarray(value, np.float32))
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def twin(name: str, arch: str, base: str, variant: str = "", kind: Q = Q.F32) -> None:
    config = json.loads((FIXTURES / base / variant / "config.json").read_text())
    weights = load_file(FIXTURES / base / "model.safetensors")
    tensors = gguf_tensors(arch, config, weights)
    write(name, arch, config, tensors, FIXTURES / base, kind)


def answer_dequantised(name: str, config: dict, original: dict) -> None:
    """transformers' answers for a GGUF llama whose tensors have these safetensors names."""
    weights = {}
    reader = gguf.GGUFReader(OUT / f"{name}.gguf")
    stored = {t.name: t for t in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for hf in original:
        t = stored[names.get_name(hf, try_suffixes=(".weight", ".bias"))]
        w = gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist())
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, key in heads.items():
            if part in hf:
                pairs = w.reshape(config[key], -1, 2, w.shape[-1])
                w = pairs.swapaxes(1, 2).reshape(w.shape)
        weights[hf] = torch.from_numpy(np.array(w, np.float32))
    folder = OUT / "dequantised"
    write_config(folder, config)
    save_file(weights, folder / "model.safetensors")
    np.savez_compressed(OUT / f"{name}.npz", **reference(load(config, folder), name))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def random_k_quant(shape: tuple[int, int], kind: Q, rng: np.random.Generator, std: float):
    """Random blocks whose values have a standard deviation of about `std`."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    where = {Q.Q4_K: (0, 2), Q.Q6_K: (208,)}[kind]  # of the float16 scales
    for offset in where:
        scale = rng.uniform(0.5, 1.5, data.shape[:2]).astype(np.float16)
        data[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    data = data.reshape(shape[0], -1)
    factor = std / gguf.quants.dequantize(data, kind).std()
    blocks = data.reshape(shape[0], -1, size)
    for offset in where:
        scale = blocks[..., offset : offset + 2].copy().view(np.float16)
        if kind == Q.Q4_K and offset == 2:  # the minimum: centre the values
            scale = scale * np.float16(7.5)
        blocks[..., offset : offset + 2] = (scale * factor).astype(np.float16).view(np.uint8)
    return data, kind


def k_quants(name: str) -> None:
    """One layer as Q4_K_M has it: Q4_K, with Q6_K for values, down and the head."""
    config = llama(
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=1,
        vocab_size=256,
    )
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    layer, prefix = "model.layers.0.", "blk.0."
    kinds = {
        "model.embed_tokens": ("token_embd", (256, 256), Q.Q4_K, 0.1),
        "lm_head": ("output", (256, 256), Q.Q6_K, 0.05),
        f"{layer}self_attn.q_proj": (f"{prefix}attn_q", (256, 256), Q.Q4_K, 0.1),
        f"{layer}self_attn.k_proj": (f"{prefix}attn_k", (64, 256), Q.Q4_K, 0.1),
        f"{layer}self_attn.v_proj": (f"{prefix}attn_v", (64, 256), Q.Q6_K, 0.1),
        f"{layer}self_attn.o_proj": (f"{prefix}attn_output", (256, 256), Q.Q4_K, 0.1),
        f"{layer}mlp.gate_proj": (f"{prefix}ffn_gate", (256, 256), Q.Q4_K, 0.1),
        f"{layer}mlp.up_proj": (f"{prefix}ffn_up", (256, 256), Q.Q4_K, 0.1),
        f"{layer}mlp.down_proj": (f"{prefix}ffn_down", (256, 256), Q.Q6_K, 0.1),
    }
    norms = {
        "model.norm": "output_norm",
        f"{layer}input_layernorm": f"{prefix}attn_norm",
        f"{layer}post_attention_layernorm": f"{prefix}ffn_norm",
    }
    tensors = {
        f"{target}.weight": random_k_quant(shape, kind, rng, std)
        for target, shape, kind, std in kinds.values()
    }
    for target in norms.values():
        tensors[f"{target}.weight"] = rng.uniform(0.5, 1.5, 256).astype(np.float32)
    write(name, "llama", config, tensors, OUT, Q.F32)
    answer_dequantised(name, config, {f"{n}.weight": 0 for n in (*kinds, *norms)})


def main() -> None:
    twin("llama3", "llama", "llama3")
    twin("smollm2", "llama", "smollm2", kind=Q.BF16)
    twin("llama_yarn", "llama", "rope", "yarn")
    twin("mistral", "llama", "mistral", "full")
    twin("qwen2", "qwen2", "qwen2")
    twin("qwen3", "qwen3", "qwen3")
    twin("gemma2", "gemma2", "gemma2", "head_scalar")
    twin("gemma3", "gemma3", "gemma3", "linear")
    twin("phi3", "phi3", "phi3", "longrope_partial")
    twin("granite", "granite", "granite")
    twin("olmo2", "olmo2", "olmo2")
    twin("llama3-q8_0", "llama", "llama3", kind=Q.Q8_0)
    config = json.loads((FIXTURES / "llama3" / "config.json").read_text())
    answer_dequantised("llama3-q8_0", config, load_file(FIXTURES / "llama3/model.safetensors"))
    k_quants("llama-q4_k_m")


if __name__ == "__main__":
    main()
