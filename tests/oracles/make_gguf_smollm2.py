"""Make tests/oracles/data/smollm2-q4_k_m.json: llama.cpp's own Q4_K_M of SmolLM2.

    PYTHONPATH=.:kernels python tests/oracles/make_gguf_smollm2.py          (llama-cpp-python)

It is made of the floats that the catalogue's file dequantises to. Of each tensor the type and the
SHA-256 of its bytes are kept, and llama.cpp's mean loss on each of the windows of
smollm2-wikitext2-nll.json.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

from llmjax.checkpoint import convert, open_checkpoint, pull
from llmjax.quantize import quantize

DATA = Path(__file__).parent / "data"


def losses(path: Path, windows: dict) -> list[float]:
    ids = np.reshape(windows["ids"], (len(windows["per"]), -1)).tolist()
    model = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False)
    found = []
    for window in ids:
        model.reset()
        model.eval(window)
        scores = np.array(model.scores[: len(window) - 1], np.float64)
        scores -= scores.max(-1, keepdims=True)
        chosen = scores[np.arange(len(window) - 1), window[1:]]
        found.append(float(np.mean(np.log(np.exp(scores).sum(-1)) - chosen)))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = convert(pull("smollm2-135m-instruct"), folder / "floats", dtype="float32")
        floats = quantize(source, folder / "floats.gguf", "gguf:F32")
        path = folder / "q4_k_m.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
        assert not llama_cpp.llama_model_quantize(
            str(floats).encode(), str(path).encode(), ctypes.byref(params)
        )
        checkpoint = open_checkpoint(path)
        tensors = {
            name: [
                info.type_name,
                hashlib.sha256(checkpoint._bytes(name, 0, info.shape[0])).hexdigest(),
            ]
            for name, info in checkpoint.tensors.items()
        }
        windows = json.loads((DATA / "smollm2-wikitext2-nll.json").read_text())
        answers = {"tensors": tensors, "per": losses(path, windows)}
    (DATA / "smollm2-q4_k_m.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
