"""Float weights quantised: each value gets the nearest code, on a grid that is a good one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_weights import unpacked

from llmjax_kernels.packed import PackedWeight, quantise
from llmjax_kernels.weight_format import QUANTISATIONS

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
EPSILON = 2.0**-20
"""Relative, of float32 arithmetic."""


def decoded(weight: PackedWeight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K / 32, 32], scales and minima [N, K / 32, 1] by format.h's description."""
    (N, K), f = weight.shape, weight.format
    tiles = np.asarray(weight.data).reshape(-1, f.tile_bytes(K))
    end = K * 16 * f.bits // 8
    vectors = tiles[:, :end].reshape(len(tiles), K // 32, f.bits, 16, 4)
    if f.bits == 4:
        halves = np.stack([vectors & 15, vectors >> 4], 3)
        vectors = halves.reshape(len(tiles), K // 32, 8, 16, 4)
    codes = vectors.transpose(0, 3, 1, 2, 4).reshape(-1, K // 32, 32)[:N].astype(np.float64)

    def halves_at(start: int) -> np.ndarray:
        stored = tiles[:, start : start + K].copy().view(np.float16).reshape(-1, K // 32, 16)
        values = stored.swapaxes(1, 2).reshape(-1, K // 32, 1)[:N].astype(np.float64)
        return np.ldexp(values, weight.exponent)

    scales = halves_at(end)
    return codes, scales, halves_at(end + K) if f.minima else -f.zero * scales


def least_error(x: np.ndarray) -> np.ndarray:
    """The weighted error of groups [..., 32] by make_qkx2_quants, in float64.

    Of each number of steps it tries the worst that float32 may make of codes that lie in between.
    """
    weight = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)

    def total(values: np.ndarray) -> np.ndarray:
        return values.sum(-1, keepdims=True)

    def error(steps: float) -> np.ndarray:
        code = np.clip(np.round((x - low) * steps / (high - low)), 0, 15)
        w, wc, wcc = total(weight), total(weight * code), total(weight * code * code)
        wx, wcx = total(weight * x), total(weight * code * x)
        scale = (wcx * w - wx * wc) / (wcc * w - wc * wc)
        minimum = (wcc * wx - wc * wcx) / (wcc * w - wc * wc)
        return total(weight * (code * scale + minimum - x) ** 2)[..., 0]

    tried = np.arange(14, 16.01, 0.1)
    return np.min([np.max([error(s * (1 + e)) for e in (-1e-6, 0, 1e-6)], 0) for s in tried], 0)


def random_values(N: int, groups: int, scale: float, dtype: str, seed: int) -> np.ndarray:
    """Groups of very different sizes around different centres."""
    rng = np.random.default_rng(seed)
    shape = (N, groups, 1)
    values = rng.standard_normal((N, groups, 32)) + rng.uniform(-3, 3, shape)
    values *= scale * 10.0 ** rng.uniform(-2, 0, shape)
    return values.reshape(N, -1).astype(DTYPES[dtype])


cases = {
    "N": st.sampled_from([1, 15, 16, 17, 83]),
    "groups": st.integers(1, 3),
    "scale": st.sampled_from([1e-30, 1e-4, 0.02, 1.0, 1000.0]),
    "dtype": st.sampled_from(list(DTYPES)),
    "seed": st.integers(0, 1 << 16),
}


@pytest.mark.every_isa
@settings(max_examples=60, deadline=None)
@given(**cases)
def test_int8_is_within_half_a_step(N, groups, scale, dtype, seed):
    values = random_values(N, groups, scale, dtype, seed)
    weight = quantise(values, "int8")
    codes, scales, _ = decoded(weight)
    exact = values.astype(np.float64).reshape(codes.shape)
    ideal = np.abs(exact).max(-1, keepdims=True) / 127
    least = 2.0 ** (weight.exponent - 24)  # the smallest float16
    assert (np.abs(scales - ideal) <= 2.0**-11 * ideal + least).all()
    found = (codes - 128) * scales
    assert (np.abs(found - exact) <= (0.5 + EPSILON * 127) * scales).all()
    np.testing.assert_array_equal(unpacked(weight), found.reshape(values.shape).astype(np.float32))


@pytest.mark.every_isa
@settings(max_examples=60, deadline=None)
@example(N=83, groups=2, scale=1000.0, dtype="float16", seed=149)  # a code in between
@given(**cases)
def test_int4_is_on_the_grid_of_least_error(N, groups, scale, dtype, seed):
    values = random_values(N, groups, scale, dtype, seed)
    weight = quantise(values, "int4")
    codes, scales, minima = decoded(weight)
    exact = values.astype(np.float64).reshape(codes.shape)
    least = 2.0 ** (weight.exponent - 24)
    found = codes * scales + minima
    # To the nearest code, where there is one.
    inside = np.clip(exact, minima, minima + 15 * scales)
    slack = EPSILON * (np.abs(minima) + 15 * scales) + least
    assert (np.abs(found - inside) <= 0.5 * scales + slack).all()
    np.testing.assert_allclose(
        unpacked(weight), found.reshape(values.shape), rtol=1e-6, atol=1e-6 * np.abs(exact).max()
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        bound = np.nan_to_num(least_error(exact))  # 0 where all are alike
    counts = np.sqrt((exact**2).mean(-1, keepdims=True)) + np.abs(exact)
    error = (counts * (found - exact) ** 2).sum(-1)
    # The float16 minimum may be off by half a unit in its last place, the scale likewise.
    off = 2.0**-11 * (np.abs(minima) + 15 * scales) + least
    assert (np.sqrt(error) <= 1.01 * np.sqrt(bound) + np.sqrt(counts.sum(-1)) * off[..., 0]).all()


@pytest.mark.parametrize("name", QUANTISATIONS)
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-40, 1e38])
def test_groups_of_one_value(name, value):
    values = np.full((17, 64), value, np.float32)
    np.testing.assert_allclose(unpacked(quantise(values, name)), values, rtol=2.0**-11, atol=1e-36)


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_a_single_outlier_and_no_rows(name):
    values = np.zeros((3, 96), np.float32)
    values[1, 40] = -5
    np.testing.assert_allclose(unpacked(quantise(values, name)), values, atol=5 * 2.0**-11)
    assert unpacked(quantise(values[:0], name)).shape == (0, 96)


@pytest.mark.parametrize("name", QUANTISATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_not_finite_is_refused(name, value, dtype):
    values = np.ones((33, 32), dtype)
    values[20, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantise(values, name)
