"""Random weights in every packed format, and what their values are made of."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np
from coded_weights import CODED, group_size, random_codes
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from llmjax_kernels.packed import PackedWeight, pack_float, pack_gguf
from llmjax_kernels.weight_format import GGUF_FORMATS

# Where a block has its float16 scale, and its float16 minimum.
SCALE_AT = {
    "Q2_K": 80,
    "Q3_K": 108,
    "Q6_K": 208,
}
MINIMUM_AT = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2, "Q2_K": 82}
FLOATS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
QUANTISED = (*GGUF_FORMATS, *CODED)
FORMATS = (*QUANTISED, *FLOATS)


unpacked = jax.jit(PackedWeight.unpack)


def block_size(format: str) -> int:
    """The fewest inputs that a weight of this format can have."""
    if format in CODED:
        return group_size(format)
    return GGML_QUANT_SIZES[GGMLQuantizationType[format]][0] if format in GGUF_FORMATS else 1


def order_of(weight: PackedWeight) -> np.ndarray:
    """The input that is at each place of a packed weight."""
    K = weight.shape[1]
    if weight.order is None:
        return np.arange(K)
    return np.asarray(weight.data[weight.order : weight.order + 4 * K]).view(np.int32)


@dataclass(frozen=True)
class RandomWeight:
    """A weight's GGUF rows; its values are `product` + `minimum`, [N, K] each."""

    type_name: str
    K: int
    rows: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return quants.dequantize(self.rows, GGMLQuantizationType[self.type_name])

    @property
    def product(self) -> np.ndarray:
        return self._without(MINIMUM_AT.get(self.type_name))

    @property
    def minimum(self) -> np.ndarray:
        if self.type_name not in MINIMUM_AT:
            return np.zeros_like(self.values)
        return self._without(SCALE_AT.get(self.type_name, 0))

    def pack(self) -> PackedWeight:
        return pack_gguf(self.type_name, self.rows, self.K)

    def _without(self, offset: int | None) -> np.ndarray:
        rows = self.rows
        if offset is not None:
            rows = _blocks(rows, self.type_name).copy()
            rows[..., offset : offset + 2] = 0
        return RandomWeight(self.type_name, self.K, rows.reshape(self.rows.shape)).values


def random_rows(
    type_name: str, N: int, K: int, rng: np.random.Generator, scale: float = 0.01
) -> RandomWeight:
    """Every code is as likely as any; blocks' scales are between a tenth of `scale` and it."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    assert K % block == 0
    rows = rng.integers(0, 256, (N, K // block * nbytes), np.uint8)
    blocks = _blocks(rows, type_name)
    for offset in (SCALE_AT.get(type_name, 0), MINIMUM_AT.get(type_name)):
        if offset is not None:
            sizes = rng.uniform(0.1, 1, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
            halves = (sizes * scale).astype(np.float16)
            blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    return RandomWeight(type_name, K, rows)


def random_weight(
    format: str, N: int, K: int, rng: np.random.Generator
) -> tuple[PackedWeight, np.ndarray]:
    """A packed weight, and how large the numbers are that its values are sums of, [N, K]."""
    if format in FLOATS:
        values = rng.standard_normal((N, K)).astype(FLOATS[format])
        return pack_float(values), np.abs(values.astype(np.float32))
    if format in CODED:
        coded = random_codes(format, N, K, rng)
        return coded.pack(), coded.magnitude
    weight = random_rows(format, N, K, rng)
    return weight.pack(), np.abs(weight.product) + np.abs(weight.minimum)


def _blocks(rows: np.ndarray, type_name: str) -> np.ndarray:
    return rows.reshape(len(rows), -1, GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1])
