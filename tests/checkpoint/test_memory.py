"""Loading keeps no second copy of the weights in host memory."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from test_sharded import run
from tiny_files import (
    HIDDEN,
    MLP,
    TINY_TOKENIZER,
    VOCAB,
    finish,
    gguf_tensors,
    hf_tensors,
    new_writer,
    write_folder,
)

from llmjax.checkpoint import convert
from llmjax_kernels import native

ROWS = 1 << 19
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
"""The same tensors as heads that the native kernels take."""
Q8_0 = GGMLQuantizationType.Q8_0
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
)

needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")


@pytest.fixture
def big_tensors():
    """A model whose embedding and head are 128 MB each in float32."""
    table = np.full((ROWS, HIDDEN), 0.5, np.float32)
    return hf_tensors() | {"model.embed_tokens.weight": table, "lm_head.weight": table}


@pytest.fixture
def folders(tmp_path, tiny_model):
    def write(name, tensors, **config):
        folder = write_folder(tmp_path / name, tensors, **config)
        for file in TINY_TOKENIZER:
            (folder / file).write_bytes((tiny_model / file).read_bytes())
        return folder

    return write


def assert_lean(*arguments, pages=0, least=130e6):
    found = run("load_memory.py", *arguments, pages)
    assert found["weights"] > least
    assert found["rise"] <= 1.3 * found["weights"]


@pytest.mark.parametrize(("stored", "dtype"), [("bf16", "float32"), ("f4", "bfloat16")])
def test_safetensors(folders, big_tensors, stored, dtype):
    stored = np.dtype(ml_dtypes.bfloat16 if stored == "bf16" else stored)
    tensors = {name: value.astype(stored) for name, value in big_tensors.items()}
    assert_lean(folders("small", None), folders("big", tensors, vocab_size=ROWS), dtype)


@needs_native
def test_safetensors_packed(folders, big_tensors):
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in big_tensors.items()}
    small, big = folders("small", None, **WIDE), folders("big", tensors, vocab_size=ROWS, **WIDE)
    assert_lean(small, big, "auto", pages=16)


@needs_native
@pytest.mark.parametrize(("quantization", "least"), [("int8", 70e6), ("int4", 54e6)])
def test_safetensors_quantised(folders, big_tensors, quantization, least):
    small, big = (
        folders("small", None, **WIDE),
        folders("big", big_tensors, vocab_size=ROWS, **WIDE),
    )
    assert_lean(small, big, quantization, pages=16, least=least)


@needs_native
def test_codes_that_lie_along_the_outputs(folders, big_tensors):
    embed = big_tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    tensors = big_tensors | {"model.embed_tokens.weight": embed}
    del tensors["lm_head.weight"]
    tensors["lm_head.qweight"] = np.full((HIDDEN // 8, ROWS), 0x12345678, np.int32)
    tensors["lm_head.qzeros"] = np.full((HIDDEN // 32, ROWS // 8), 0x77777777, np.int32)
    tensors["lm_head.scales"] = np.full((HIDDEN // 32, ROWS), 0.1, np.float16)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    small = folders("small", None, **WIDE)
    big = folders("big", tensors, vocab_size=ROWS, quantization_config=settings, **WIDE)
    assert_lean(small, big, "auto", pages=16, least=80e6)


@pytest.mark.parametrize(
    ("dtype", "pages", "least"),
    [("float32", 0, 130e6), pytest.param("auto", 16, 70e6, marks=needs_native)],
)
def test_gguf(folders, big_tensors, tmp_path, dtype, pages, least):
    writer = new_writer(tmp_path / "big.gguf", heads=4)
    for name, value in gguf_tensors(big_tensors).items():
        if len(value) == ROWS:
            writer.add_tensor(name, gguf.quants.quantize(value, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, value)
    finish(writer)
    big = tmp_path / "big.gguf"
    assert_lean(folders("small", None, **WIDE), big, dtype, pages=pages, least=least)


def test_gguf_with_all_that_comes_along(tmp_path):
    """Imports, vocabulary and tokenizer count: a model of Gemma 3 270M's size is the smallest
    that they must not dominate."""
    words = ("".join(w) for n in range(1, 5) for w in product(ascii_lowercase, repeat=n))
    tokens, mlp = ["<unk>", "<s>", "</s>", *islice(words, (1 << 18) - 3)], 9 << 16
    writer = new_writer(tmp_path / "big.gguf", mlp=mlp, tokens=tokens)
    sizes = {VOCAB: len(tokens), MLP: mlp}
    for name, value in gguf_tensors().items():
        shape = [sizes.get(n, n) for n in value.shape]
        if value.ndim == 2:
            block, nbytes = GGML_QUANT_SIZES[Q8_0]
            stored = np.zeros((shape[0], shape[1] // block * nbytes), np.uint8)
            writer.add_tensor(name, stored, raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, value)
    finish(writer)
    assert_lean(tmp_path / "big.gguf", "bfloat16")


def test_orbax(folders, big_tensors, tmp_path):
    big = folders("big", big_tensors, vocab_size=ROWS)
    small = convert(folders("small", None), tmp_path / "small-out", progress=False)
    assert_lean(small, convert(big, tmp_path / "big-out", progress=False), "float32")
