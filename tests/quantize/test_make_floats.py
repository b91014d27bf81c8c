"""Small floats: every weight goes to the nearest value that its format has."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from llmjax.quant.base import TABLES
from llmjax.quantize.float_codes import fp8, mxfp4, nvfp4
from llmjax.quantize.rounding import input_format
from llmjax_kernels.quant_matmul import round_rows


def weights(N: int = 48, K: int = 96) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((N, K)) * np.exp(rng.standard_normal((N, 1)))).astype(np.float32)


def nearest_in(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How far each value is from the nearest entry."""
    return np.abs(values[..., None] - table[np.isfinite(table)]).min(axis=-1)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_fp8(granularity):
    weight = weights(200, 160)
    coded = fp8(weight, granularity, np.dtype(np.float32))
    scale = coded.tensors["weight_scale"]
    assert scale.shape == {"tensor": (1,), "channel": (200, 1), "block": (2, 2)}[granularity]
    spread = scale
    if granularity == "block":
        spread = np.kron(scale, np.ones((128, 128), np.float32))[:200, :160]
    stored = coded.tensors["weight"]
    assert stored.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(stored.astype(np.float32) * spread, coded.values)
    error = np.abs(stored.astype(np.float32) - weight / spread)
    np.testing.assert_allclose(error, nearest_in(TABLES["e4m3"], weight / spread), atol=1e-4)
    assert np.abs(stored.astype(np.float32)).max() == 448


def unpacked(packed: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return TABLES["e2m1"][codes]


def test_nvfp4():
    weight = weights()
    coded = nvfp4(weight, 2 * float(np.abs(weight).max()))
    whole = coded.tensors["weight_global_scale"]
    assert whole == pytest.approx(448 * 6 / (2 * np.abs(weight).max()))
    scales = coded.tensors["weight_scale"]
    assert scales.shape == (48, 6)
    spread = (scales.astype(np.float32) / whole).repeat(16, axis=1)
    numbers = unpacked(coded.tensors["weight_packed"])
    np.testing.assert_allclose(numbers * spread, coded.values, rtol=1e-6)
    error = np.abs(numbers - weight / spread)
    np.testing.assert_allclose(error, nearest_in(TABLES["e2m1"], weight / spread), atol=1e-5)
    # Each block's greatest is 6 scales, as near as E4M3 has them.
    most = np.abs(weight).reshape(48, 6, 16).max(axis=2)
    np.testing.assert_allclose(spread[:, ::16] * 6, most, rtol=1 / 15)


def test_mxfp4():
    weight = weights()
    weight[0, :32] = 0
    coded = mxfp4(weight)
    scales = np.exp2(coded.tensors["weight_scale"].astype(np.float32) - 127)
    spread = scales.repeat(32, axis=1)
    numbers = unpacked(coded.tensors["weight_packed"])
    np.testing.assert_array_equal(numbers * spread, coded.values)
    greatest = np.abs(weight).reshape(len(weight), -1, 32).max(axis=2)
    steps = (greatest / scales)[greatest > 0]
    assert 3.5 <= steps.min() < 3.6 and 6.9 < steps.max() < 7
    error = np.abs(coded.values - weight) / spread
    saturated = np.abs(weight) > 6 * spread
    wanted = nearest_in(TABLES["e2m1"], weight / spread)
    np.testing.assert_allclose(error[~saturated], wanted[~saturated], atol=1e-6)
    assert (np.abs(coded.values) == 6 * spread)[saturated].all()
    assert not coded.values[0, :32].any()


def test_inputs_in_groups():
    x = weights(8, 256)
    found = round_rows(x, input_format("fp8_e4m3", group=128))
    for part in (slice(0, 128), slice(128, 256)):
        scale = np.abs(x[:, part]).max(axis=1, keepdims=True) / 448
        error = np.abs(np.asarray(found)[:, part] - x[:, part]) / scale
        np.testing.assert_allclose(error, nearest_in(TABLES["e4m3"], x[:, part] / scale), atol=1e-3)


def test_static_inputs_saturate():
    x = np.array([[1.0, -300.0, 300.0]], np.float32)
    found = round_rows(x, input_format("int8", static=True), np.array([1.0, 0.0], np.float32))
    np.testing.assert_array_equal(found, [[1, -128, 127]])
