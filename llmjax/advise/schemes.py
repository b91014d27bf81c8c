"""What weights may become: bits, scales counted, and the type in which they are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..simulate.device import Figures, Weights
from ..simulate.shapes import ModelShape

AMPERE = 80
"""Compute capability of the first GPUs with bfloat16, from which on llmjax has kernels."""
GROUP_OF_128 = 4 + (16 + 4) / 128
"""Codes of 4 bits, a float16 scale and a zero point for 128: GPTQ's and AWQ's usual files."""
PACKED = {"Q4_K": 5.0, "Q5_0": 5.5, "Q6_K": 7.0, "Q8_0": 8.5}
"""Bits of a weight as llmjax's native kernels keep GGUF's types in memory."""
IN_256, FALLBACKS = 256, {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""Rows that are no multiple of 256 get another type from llama.cpp."""
INT8, INT4 = 8.5, 5.0
"""Of what `--quantization` makes, in groups of 32: a float16 scale, for int4 a minimum too."""


@dataclass(frozen=True)
class Scheme:
    """One way to quantise a model.

    Attributes:
        about: for people, and its source.
        bits: of a code.
        weights: of a model on a device; None where it is not for that device.
    """

    name: str
    about: str
    bits: int
    weights: Callable[[ModelShape, Figures], Weights | None]


def _is_cpu(figures: Figures) -> bool:
    return figures.compute_capability == 0


def _bf16(shape: ModelShape, figures: Figures) -> Weights:
    return Weights("bf16", 16, 16, 16)


def _fp8(shape: ModelShape, figures: Figures) -> Weights | None:
    if figures.compute_capability < AMPERE:
        return None
    return Weights("fp8", 8, 16, 16, "fp8" if figures.fp8 else "bfloat16")


def _smoothquant(shape: ModelShape, figures: Figures) -> Weights | None:
    if _is_cpu(figures) or not figures.int8:
        return None
    return Weights("smoothquant", 8, 16, 16, "int8")


def _int4_of(name: str) -> Callable[[ModelShape, Figures], Weights | None]:
    def weights(shape: ModelShape, figures: Figures) -> Weights | None:
        return None if _is_cpu(figures) else Weights(name, GROUP_OF_128, 16, 16)

    return weights


def _fp4_of(name: str, bits: float) -> Callable[[ModelShape, Figures], Weights | None]:
    def weights(shape: ModelShape, figures: Figures) -> Weights | None:
        return Weights(name, bits, 16, 16, "fp4") if figures.fp4 else None

    return weights


def _own(name: str, bits: float) -> Callable[[ModelShape, Figures], Weights | None]:
    """What `--quantization` makes: all matrices, that of the logits in 8 bits."""

    def weights(shape: ModelShape, figures: Figures) -> Weights | None:
        if _is_cpu(figures):
            return Weights(name, bits, INT8, bits, "int8", "int8")
        if figures.compute_capability < AMPERE:
            return None
        return Weights(name, bits, INT8, bits)

    return weights


def _q8_0(shape: ModelShape, figures: Figures) -> Weights | None:
    bits = PACKED["Q8_0"]
    return Weights("q8_0", bits, bits, bits, "int8", "int8") if _is_cpu(figures) else None


def _q4_k_m(shape: ModelShape, figures: Figures) -> Weights | None:
    """Q4_K, but Q6_K for the logits, and for values and the feed-forward's last matrix in those
    layers in which llama.cpp's `use_more_bits` asks for it."""
    if not _is_cpu(figures):
        return None
    layers, eighth = shape.num_layers, shape.num_layers // 8
    finer = sum(i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2 for i in range(layers))
    D, F = shape.hidden_size, shape.mlp_size
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    coarse = layers * D * (heads + kv + 2 * F) * _packed("Q4_K", D)  # queries, keys, gate and up
    coarse += layers * D * heads * _packed("Q4_K", heads)
    either = D * kv, D * F
    mixed = sum(
        size * (finer * _packed("Q6_K", row) + (layers - finer) * _packed("Q4_K", row))
        for size, row in zip(either, (D, F), strict=True)
    )
    bits = (coarse + mixed) / shape.matrix_params
    return Weights("q4_k_m", bits, _packed("Q6_K", D), _packed("Q4_K", D), "int8", "int8")


def _packed(kind: str, row: int) -> float:
    """Bits of a weight of a GGUF type, or of the one that rows of this length get in its place."""
    return PACKED[kind if row % IN_256 == 0 else FALLBACKS[kind]]


_ALL = (
    Scheme("bf16", "weights as they are (float16 on a T4)", 16, _bf16),
    Scheme("fp8", "E4M3, a scale a row; activations too where the GPU multiplies FP8", 8, _fp8),
    Scheme("smoothquant", "int8 by int8 (W8A8; Xiao et al. 2023)", 8, _smoothquant),
    Scheme("awq", "int4 in groups of 128 (W4A16; Lin et al. 2024)", 4, _int4_of("awq")),
    Scheme("gptq", "int4 in groups of 128 (W4A16; Frantar et al. 2023)", 4, _int4_of("gptq")),
    Scheme("nvfp4", "FP4 by FP4, an FP8 scale for 16", 4, _fp4_of("nvfp4", 4 + 8 / 16)),
    Scheme("mxfp4", "FP4 by FP4, an exponent for 32 (OCP MX)", 4, _fp4_of("mxfp4", 4 + 8 / 32)),
    Scheme("int8", "llmjax's own: rounded in groups of 32, no data needed", 8, _own("int8", INT8)),
    Scheme("int4", "llmjax's own: rounded in groups of 32, no data needed", 4, _own("int4", INT4)),
    Scheme("q8_0", "GGUF's, as the native kernels keep it", 8, _q8_0),
    Scheme("q4_k_m", "GGUF's, as the native kernels keep it", 4, _q4_k_m),
)
SCHEMES = {scheme.name: scheme for scheme in _ALL}


def weights_here(shape: ModelShape, figures: Figures) -> dict[str, Weights]:
    """Of each scheme that is for a device."""
    made = {name: scheme.weights(shape, figures) for name, scheme in SCHEMES.items()}
    return {name: weights for name, weights in made.items() if weights is not None}
