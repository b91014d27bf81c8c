"""GGUF's blocks, laid out for GPUs, keep their values to the last bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import SCALE_AT, block_size, random_rows
from triton_backend import triton_backend

from llmjax_kernels.quant_matmul import (
    QuantFormat,
    QuantWeight,
    from_gguf,
    gguf,
    gguf_quant_format,
    jax_triton,
)
from llmjax_kernels.quant_matmul.args import QuantMatmulArgs
from llmjax_kernels.weight_format import GGUF_FORMATS

BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q8_0": 8.5,
    "Q2_K": 5.125,
    "Q3_K": 4.5625,
    "Q4_K": 4.625,
    "Q5_K": 8.625,
    "Q6_K": 8.5625,
    "IQ4_NL": 8.5,
    "IQ4_XS": 8.3125,
}
"""Of a weight, as docs/gpu.md says."""
by_type = pytest.mark.parametrize("type_name", GGUF_FORMATS)
values = jax.jit(QuantWeight.dequantise)


@by_type
def test_values_are_those_of_the_gguf_package(type_name):
    for N, blocks in ((1, 1), (83, 3)):
        for scale in (6e-8, 0.01, 1000.0):
            K = blocks * block_size(type_name)
            stored = random_rows(type_name, N, K, np.random.default_rng(N), scale)
            weight = from_gguf(type_name, stored.rows, K)
            assert weight.format == gguf_quant_format(type_name, K)
            assert weight.nbytes * 8 == BITS[type_name] * N * K
            np.testing.assert_array_equal(values(weight), stored.values)


@by_type
def test_triton_multiplies_them(type_name, monkeypatch):
    rng = np.random.default_rng(0)
    stored = random_rows(type_name, 67, 512, rng)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    product = triton_backend(monkeypatch, jax_triton, QuantMatmulArgs)
    found = product(jnp.asarray(x), from_gguf(type_name, stored.rows, 512), x.dtype)
    expected = x.astype(np.float64) @ stored.values.T.astype(np.float64)
    size = np.abs(x) @ (np.abs(stored.product) + np.abs(stored.minimum)).T
    assert (np.abs(found - expected) <= 1e-6 * size).all()


@pytest.mark.parametrize("type_name", ["Q4_0", "Q3_K", "Q5_K"])
def test_rows_may_be_read_few_at_a_time(type_name, monkeypatch):
    stored = random_rows(type_name, 17, 256, np.random.default_rng(0))
    monkeypatch.setattr(gguf, "BLOCK_WEIGHTS", 1)
    weight = from_gguf(type_name, stored.rows, 256)
    np.testing.assert_array_equal(values(weight), stored.values)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K"])
def test_scales_that_are_not_finite_are_refused(type_name):
    rows = random_rows(type_name, 3, 256, np.random.default_rng(0)).rows.copy()
    at = SCALE_AT.get(type_name, 0)
    rows[1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="scales that are not finite"):
        from_gguf(type_name, rows, 256)


def test_which_types_stay():
    assert gguf_quant_format("Q4_0", 64) == QuantFormat("int4", 32, zero=8)
    assert gguf_quant_format("Q4_K", 512) == QuantFormat("int4", 32, minima=True, span=256)
    assert gguf_quant_format("IQ2_XXS", 256) is None
    assert gguf_quant_format("F16", 256) is None
