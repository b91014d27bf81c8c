"""Make tests/quantize/fixtures/gguf_llamacpp.npz: llama.cpp's logits [T, V] for what we write.

PYTHONPATH=.:kernels:tests:tests/quantize python tests/oracles/make_gguf_llamacpp.py
(llama-cpp-python)
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from gguf_cases import IDS, sources

from llmjax.quantize import quantize

OUT = Path(__file__).parents[1] / "quantize" / "fixtures" / "gguf_llamacpp.npz"


def logits(path: Path) -> np.ndarray:
    floats = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, **floats)
    assert model.tokenize(b"Hi!", add_bos=False, special=True)
    model.eval(IDS)
    return np.array(model.scores[: len(IDS)], np.float32)


def main() -> None:
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (source, method) in sources(Path(folder)).items():
            path = quantize(source, Path(folder) / f"{name}.gguf", method, progress=False)
            answers[name] = logits(path)
    np.savez_compressed(OUT, **answers)


if __name__ == "__main__":
    main()
