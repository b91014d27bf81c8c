"""Products with quantised weights, compiled for machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from aot import compile_for
from jax.sharding import Mesh
from targets import TARGETS, Target

from llmjax_kernels.quant_matmul import (
    FORMATS,
    InputFormat,
    QuantFormat,
    quant_matmul,
    weight_shapes,
)
from llmjax_kernels.quant_matmul.jax_triton import multiplies_codes


@dataclass(frozen=True)
class Product:
    """M rows times a weight [N, K]; by default that of Llama 3 8B's mlp."""

    format: QuantFormat
    M: int
    N: int = 14336
    K: int = 4096
    dtype: str = "bfloat16"

    def compile(self, target: Target, mesh: Mesh) -> Any:
        x = jax.ShapeDtypeStruct((self.M, self.K), self.dtype)
        weight = weight_shapes(self.N, self.K, self.format)
        return compile_for(target, mesh, quant_matmul, x, weight)


CODES = {
    "int8 by int8": QuantFormat("int8", inputs=InputFormat("int8")),
    "fp8 by fp8": QuantFormat("fp8_e4m3", inputs=InputFormat("fp8_e4m3")),
    "fp8 by fp8, blocks": QuantFormat("fp8_e4m3", 128, inputs=InputFormat("fp8_e4m3", 128)),
}
DEQUANTISED = {
    **FORMATS,
    "int4, groups of 128": QuantFormat("int4", 128, minima=True),
    "fp8, blocks": QuantFormat("fp8_e4m3", 128),
}
GGUF = {
    "Q2_K": QuantFormat("int4", 16, minima=True, span=256),
    "Q4_0": QuantFormat("int4", 32, zero=8),
    "Q4_K": QuantFormat("int4", 32, minima=True, span=256),
    "Q5_K": QuantFormat("int8", 32, minima=True, span=256),
    "Q6_K": QuantFormat("int8", 16, span=256),
}
"""Formats that GGUF's types become and others do not; the types that are not here differ from
these in nothing that a kernel is made by, or in having no minima."""
SIZES = {"decode of one": 1, "decode": 32, "decode of 64": 64, "prefill": 2048}
ALL = {
    f"{name} {size}": Product(format, M)
    for name, format in (DEQUANTISED | CODES).items()
    for size, M in SIZES.items()
} | {
    "int4 odd": Product(FORMATS["int4"], 33, 1001, 1001),
    "int8 float16": Product(FORMATS["int8"], 2048, dtype="float16"),
    "int4 float32 decode": Product(FORMATS["int4"], 8, dtype="float32"),
    "int8 float32 prefill": Product(FORMATS["int8"], 2048, dtype="float32"),
    "fp8 float32 prefill": Product(FORMATS["fp8"], 2048, dtype="float32"),
}
ALL |= {
    f"{name} {size}": Product(format, SIZES[size])
    for name, format in GGUF.items()
    for size in ("decode", "prefill")
}
PRODUCTS = {
    target.arch: {n: p for n, p in ALL.items() if multiplies_codes(p.format, target.gpu)}
    for target in TARGETS.values()
}
"""By architecture: an A100 multiplies no FP8."""
