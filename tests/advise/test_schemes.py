"""Bits of weights beside what the kernels keep, and which device gets which scheme."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmjax.advise.schemes import INT4, INT8, PACKED, SCHEMES, weights_here
from llmjax.checkpoint import open_checkpoint, pull
from llmjax.config import QUANTIZATIONS
from llmjax.errors import DownloadError
from llmjax.simulate.device import DEVICES, Figures, Machine
from llmjax.simulate.shapes import SHAPES, ModelShape
from llmjax_kernels.quant_matmul import FORMATS, weight_shapes
from llmjax_kernels.weight_format import GGUF_FORMATS, QUANTISATIONS, WeightFormat, gguf_format

CPU = Figures(16e9, 24e9, 0.4e12, 24e9, 24e9, "test", int8=1.6e12)
GGUF = Path(__file__).parents[1] / "models/fixtures/gguf"


def bits(format: WeightFormat) -> float:
    return format.nbytes(4096, 4096) * 8 / 4096**2


def test_gguf_types_as_native_kernels_keep_them():
    for name, expected in PACKED.items():
        assert bits(GGUF_FORMATS[name][1]) == expected


def test_what_quantization_makes():
    assert bits(QUANTISATIONS["int8"]) == INT8
    assert bits(QUANTISATIONS["int4"]) == INT4
    for name, expected in (("int8", INT8), ("int4", INT4), ("fp8", 8)):
        weight = weight_shapes(4096, 4096, FORMATS[name])
        taken = sum(array.size * array.dtype.itemsize for array in (weight.codes, weight.scales))
        assert taken * 8 / 4096**2 == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("h100", "bf16 fp8 smoothquant awq gptq int8 int4"),
        ("a100-80gb", "bf16 fp8 smoothquant awq gptq int8 int4"),
        ("l4", "bf16 fp8 smoothquant awq gptq int8 int4"),
        ("t4", "bf16 smoothquant awq gptq"),
        ("b200", "bf16 fp8 smoothquant awq gptq nvfp4 mxfp4 int8 int4"),
        ("cpu", "bf16 int8 int4 q8_0 q4_k_m"),
    ],
)
def test_schemes_of_a_device(gpu, expected):
    figures = CPU if gpu == "cpu" else DEVICES[gpu]
    assert list(weights_here(SHAPES["llama-3-8b"], figures)) == expected.split()


def test_every_quantization_of_the_engine_is_a_scheme():
    assert set(QUANTIZATIONS) <= SCHEMES.keys()


@pytest.mark.parametrize(
    ("gpu", "scheme", "products"),
    [
        ("h100", "fp8", "fp8"),
        ("l4", "fp8", "fp8"),
        ("a100-80gb", "fp8", "bfloat16"),
        ("a100-80gb", "smoothquant", "int8"),
        ("h100", "awq", "bfloat16"),
        ("b200", "nvfp4", "fp4"),
        ("b200", "mxfp4", "fp4"),
        ("h100", "int8", "bfloat16"),
        ("cpu", "int8", "int8"),
        ("cpu", "q4_k_m", "int8"),
        ("cpu", "bf16", "bfloat16"),
    ],
)
def test_what_a_scheme_multiplies(gpu, scheme, products):
    figures = CPU if gpu == "cpu" else DEVICES[gpu]
    assert weights_here(SHAPES["llama-3-8b"], figures)[scheme].products == products


def q4_k_m_bytes(shape: ModelShape) -> int:
    return Machine(shape, CPU, weights_here(shape, CPU)["q4_k_m"]).weight_bytes


def packed_bytes(file: Path) -> int:
    """Of a GGUF file's matrices, as the native kernels keep them."""
    matrices = [info for info in open_checkpoint(file).tensors.values() if len(info.shape) == 2]
    formats = [gguf_format(info.type_name, info.shape[1]) for info in matrices]
    return sum(f.nbytes(*info.shape) for f, info in zip(formats, matrices, strict=True) if f)


def test_q4_k_m_is_what_llamacpp_makes_of_whole_blocks():
    shape = ModelShape(256, 256, 1, 4, 1, 64, 256, 1024)
    assert q4_k_m_bytes(shape) == packed_bytes(GGUF / "llama-q4_k_m.gguf")


def test_q4_k_m_is_what_llamacpp_makes_of_rows_that_are_no_whole_blocks():
    try:
        file = pull("gemma-3-270m", progress=False)
    except DownloadError as error:
        pytest.skip(f"Gemma 3 cannot be fetched here: {error}")
    shape = ModelShape(262_144, 640, 18, 4, 1, 256, 2048, 32_768, tie_embeddings=True)
    assert q4_k_m_bytes(shape) == packed_bytes(file)


def test_q4_k_m_of_llama_3_8b():
    # Its published file has 4.92 GB, of which Q4_K takes 4.5 bits and Q6_K 6.5625, not 5 and 7.
    shape = SHAPES["llama-3-8b"]
    finer = 16 * 4096 * (8 * 128 + 14336)
    coarse = shape.matrix_params - finer + shape.head_params
    in_file = (4.5 * coarse + 6.5625 * (finer + shape.head_params)) / 8
    assert in_file == pytest.approx(4.92e9, rel=2e-3)
    assert q4_k_m_bytes(shape) == (5 * coarse + 7 * (finer + shape.head_params)) // 8
