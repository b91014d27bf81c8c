"""Decode and prefill of a model of Qwen2.5-Coder-0.5B's shapes, by the way its weights are stored.

Weights are random: speed does not depend on them. Writes the folders, loads each model and then
measures one after the other, as `llmjax bench latency` does:

    python docs/benchmarks/quantised.py --tokenizer FOLDER --out build/quantised
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from llmjax import LLM
from llmjax.bench import latency

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
GROUP = 128
STREAMS, STEPS, PROMPT = (1, 8), 32, 512
Tensors = dict[str, np.ndarray]
RNG = np.random.default_rng(0)


def bfloat16(name: str, N: int, K: int) -> Tensors:
    values = RNG.standard_normal((N, K), np.float32) / np.sqrt(K)
    return {f"{name}.weight": values.astype(ml_dtypes.bfloat16)}


def gptq(bits: int) -> Callable[[str, int, int], Tensors]:
    """Symmetric, in groups of 128."""

    def tensors(name: str, N: int, K: int) -> Tensors:
        def words(*shape: int) -> np.ndarray:
            return RNG.integers(-(2**31), 2**31, shape, np.int32)

        zeros = sum((2 ** (bits - 1) - 1) << i for i in range(0, 32, bits))
        scale = 2.0 ** (1 - bits) / np.sqrt(K)
        return {
            f"{name}.qweight": words(K * bits // 32, N),
            f"{name}.qzeros": np.full((K // GROUP, N * bits // 32), zeros, np.uint32).view(
                np.int32
            ),
            f"{name}.scales": np.full((K // GROUP, N), scale, np.float16),
        }

    return tensors


STORED = {"bfloat16": bfloat16, "gptq-4": gptq(4), "gptq-8": gptq(8)}
RUNS = [
    ("bfloat16", None),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("gptq-4", None),
    ("gptq-4", "int8"),
    ("gptq-8", "int8"),
]
"""How weights are stored, and `--quantization`, which takes those that are floats."""


def write_folder(folder: Path, stored: str, tokenizer: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    D, F, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], 14 * 64
    shapes = {
        "self_attn.q_proj": (heads, D),
        "self_attn.k_proj": (2 * 64, D),
        "self_attn.v_proj": (2 * 64, D),
        "self_attn.o_proj": (D, heads),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    ones = np.ones(D, ml_dtypes.bfloat16)
    tensors = bfloat16("model.embed_tokens", CONFIG["vocab_size"], D) | {"model.norm.weight": ones}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = ones
        for name, shape in shapes.items():
            tensors |= STORED[stored](f"{layer}.{name}", *shape)
            if name[-6] in "qkv" and "self_attn" in name:
                tensors[f"{layer}.{name}.bias"] = np.ones(shape[0], ml_dtypes.bfloat16)
    config = dict(CONFIG)
    if stored.startswith("gptq"):
        settings = {"quant_method": "gptq", "bits": int(stored[-1]), "group_size": GROUP}
        config["quantization_config"] = settings
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def load(out: Path, tokenizer: Path) -> dict[str, LLM]:
    """The models of `RUNS`, ready to run."""
    models = {}
    for stored, quantization in RUNS:
        if not (out / stored).exists():
            write_folder(out / stored, stored, tokenizer)
        name = f"{stored}, {quantization}" if quantization else stored
        models[name] = LLM(
            str(out / stored),
            quantization=quantization,
            max_model_len=PROMPT + 2 * STEPS,
            max_num_seqs=max(STREAMS),
            background=False,
        )
    return models


def measure(models: dict[str, LLM], iterations: int) -> None:
    """Prints tokens a second, and how many times those of the first model it is."""
    first: list[float] = []
    for name, llm in models.items():
        found = latency.measure(llm, STREAMS, steps=STEPS, input_len=PROMPT, num_iters=iterations)
        speeds = [times.tokens_per_second for times in (*found.decode.values(), found.prefill)]
        first = first or speeds
        times = " ".join(f"{s:8.1f} ({s / f:.2f})" for s, f in zip(speeds, first, strict=True))
        print(f"{name:16} {llm.engine.model.weight_bytes >> 20:5} MiB {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="where folders go")
    parser.add_argument("--num-iters", type=int, default=5)
    args = parser.parse_args()
    measure(load(args.out, args.tokenizer), args.num_iters)


if __name__ == "__main__":
    main()
