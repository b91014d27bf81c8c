"""Make tests/kernels/fixtures/gguf_blocks.npz: what llama.cpp's quantisers make of some rows.

python tests/oracles/make_gguf_blocks.py          (llama-cpp-python)
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from gguf_rows import rows

OUT = Path(__file__).parents[1] / "kernels" / "fixtures" / "gguf_blocks.npz"
TYPES = {  # number, weights of a block, bytes
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
}


def quantised(ggml: ctypes.CDLL, name: str, x: np.ndarray, importance: np.ndarray | None):
    number, size, nbytes = TYPES[name]
    out = np.zeros((len(x), x.shape[1] // size * nbytes), np.uint8)
    weight = None if importance is None else ctypes.c_void_p(importance.ctypes.data)
    count = ggml.ggml_quantize_chunk(
        ctypes.c_int(number),
        ctypes.c_void_p(x.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0),
        ctypes.c_int64(len(x)),
        ctypes.c_int64(x.shape[1]),
        weight,
    )
    assert count == out.nbytes
    return out


def main() -> None:
    [library] = Path(llama_cpp.__file__).parent.glob("lib/libggml-base.so")
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    x, importance = rows()
    answers = {"rows": x, "importance": importance}
    for name in TYPES:
        answers[name] = quantised(ggml, name, x, None)
        answers[f"{name}.importance"] = quantised(ggml, name, x, importance)
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, **answers)


if __name__ == "__main__":
    main()
