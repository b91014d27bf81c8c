"""Make tests/quantize/fixtures/gguf_mixes.json.xz: which types llama.cpp's mixes give to tensors.

    python tests/oracles/make_gguf_mixes.py          (llama-cpp-python, gguf)

The models are of zeros, which llama.cpp quantises quickly.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

OUT = Path(__file__).parents[1] / "quantize" / "fixtures" / "gguf_mixes.json.xz"
MODELS = {
    "small": {"arch": "llama", "layers": 30, "heads": 9, "kv": 3, "hidden": 288, "mlp": 768},
    "shared": {"arch": "llama", "layers": 32, "heads": 8, "kv": 2, "hidden": 256, "head": True},
    "seventy": {"arch": "llama", "layers": 80, "heads": 8, "kv": 4, "hidden": 256, "head": True},
    "qwen": {"arch": "qwen2", "layers": 80, "heads": 8, "kv": 8, "hidden": 256, "head": True},
    "gemma": {"arch": "gemma3", "layers": 18, "heads": 4, "kv": 1, "hidden": 256},
    "phi": {"arch": "phi3", "layers": 24, "heads": 4, "kv": 4, "hidden": 256, "head": True},
    "odd": {"arch": "llama", "layers": 3, "heads": 5, "kv": 5, "hidden": 80, "mlp": 256},
}
FTYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "Q2_K_S": 21,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "F16": 1,
    "BF16": 32,
}
WITH_IMPORTANCE = ("Q2_K_S", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "Q4_K_M")


def shapes(m: dict) -> dict[str, tuple[int, ...]]:
    D, F = m["hidden"], m.get("mlp", m["hidden"])
    H = D // m["heads"]
    q, kv = m["heads"] * H, m["kv"] * H
    found = {"token_embd.weight": (32, D), "output_norm.weight": (D,)}
    if m.get("head"):
        found["output.weight"] = (32, D)
    for i in range(m["layers"]):
        layer = {"attn_output.weight": (D, q), "ffn_down.weight": (D, F), "attn_norm.weight": (D,)}
        if m["arch"] == "phi3":
            layer |= {"attn_qkv.weight": (q + 2 * kv, D), "ffn_up.weight": (2 * F, D)}
        else:
            layer |= {"attn_q.weight": (q, D), "attn_k.weight": (kv, D), "attn_v.weight": (kv, D)}
            layer |= {"ffn_gate.weight": (F, D), "ffn_up.weight": (F, D)}
        layer["ffn_norm.weight"] = (D,)
        if m["arch"] == "qwen2":
            layer["attn_v.bias"] = (kv,)
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def write(m: dict, path: Path) -> None:
    writer = gguf.GGUFWriter(path, m["arch"])
    writer.add_block_count(m["layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(m["hidden"])
    writer.add_feed_forward_length(m.get("mlp", m["hidden"]))
    writer.add_head_count(m["heads"])
    writer.add_head_count_kv(m["kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    for name, shape in shapes(m).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types(source: Path, ftype: int, importance: dict[str, int] | None) -> dict[str, str]:
    target = source.with_name("quantised.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, 2
    kept = []
    if importance is not None:
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
        for entry, (name, size) in zip(entries, importance.items(), strict=False):
            kept.append((ctypes.c_float * size)(*[1.0] * size))
            entry.name, entry.size = name.encode(), size
            entry.data = ctypes.cast(kept[-1], ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    assert not llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(target).tensors}


def main() -> None:
    log = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p())
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, m in MODELS.items():
            source = Path(folder) / f"{model}.gguf"
            write(m, source)
            matrices = {n: s[1] for n, s in shapes(m).items() if len(s) == 2 and "blk" in n}
            found = {n: types(source, f, None) for n, f in FTYPES.items() if n != "Q2_K_S"}
            found |= {
                f"{n} importance": types(source, FTYPES[n], matrices) for n in WITH_IMPORTANCE
            }
            answers[model] = m | {"shapes": shapes(m), "types": found}
            source.unlink()
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(lzma.compress(json.dumps(answers).encode()))


if __name__ == "__main__":
    main()
