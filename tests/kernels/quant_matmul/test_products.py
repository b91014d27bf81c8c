"""Every backend of quant_matmul against the definition, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_backend import triton_backend

from llmjax_kernels.quant_matmul import (
    InputFormat,
    QuantFormat,
    jax_triton,
    make_weight,
    reference,
)
from llmjax_kernels.quant_matmul.args import QuantMatmulArgs

WEIGHTS = {
    "int4": QuantFormat("int4", 32, minima=True),
    "int4, groups of 128": QuantFormat("int4", 128, minima=True),
    "int4, whole rows": QuantFormat("int4"),
    "int4, groups of 16, a zero": QuantFormat("int4", 16, zero=4),
    "int4, groups of 16, minima, spans": QuantFormat("int4", 16, minima=True, span=256),
    "int8": QuantFormat("int8", 32),
    "int8, groups of 64, minima": QuantFormat("int8", 64, minima=True),
    "int8, groups of 16, spans": QuantFormat("int8", 16, span=256),
    "fp8, a scale a row": QuantFormat("fp8_e4m3"),
    "fp8, blocks": QuantFormat("fp8_e4m3", 128),
}
CODES = {
    "int8": QuantFormat("int8", inputs=InputFormat("int8")),
    "int8, groups": QuantFormat("int8", 128, inputs=InputFormat("int8", 128)),
    "fp8": QuantFormat("fp8_e4m3", inputs=InputFormat("fp8_e4m3")),
    "fp8, blocks": QuantFormat("fp8_e4m3", 128, inputs=InputFormat("fp8_e4m3", 128)),
    "int8, static": QuantFormat("int8", inputs=InputFormat("int8", static=True)),
    "fp8, static": QuantFormat("fp8_e4m3", inputs=InputFormat("fp8_e4m3", static=True)),
    "int8, as compressed-tensors": QuantFormat("int8", inputs=InputFormat("int8", reach=127.5)),
}
ROUNDED = {
    "int8, zero points": QuantFormat("int8", inputs=InputFormat("int8", symmetric=False)),
    "int8, static zero point": QuantFormat(
        "int8", inputs=InputFormat("int8", static=True, symmetric=False)
    ),
    "int8 of groups, minima": QuantFormat("int8", 64, True, InputFormat("int8")),
    "int4": QuantFormat("int8", 32, inputs=InputFormat("int4", reach=7.5)),
    "nvfp4": QuantFormat("fp8_e4m3", 16, inputs=InputFormat("e2m1", 16, scales="e4m3")),
    "mxfp4": QuantFormat("fp8_e4m3", 32, inputs=InputFormat("e2m1", 32, scales="e8m0")),
    "mxfp8": QuantFormat("fp8_e4m3", 32, inputs=InputFormat("fp8_e4m3", 32, scales="e8m0")),
    "LLM.int8": QuantFormat("int8", inputs=InputFormat("int8", threshold=1.5)),
}
SIZES = {"one row": (1, 96, 672), "few": (19, 65, 300), "many": (70, 67, 97)}
"""M, N, K."""
FAST = {"xla_backend_optimization_level": 0}
"""To compile."""
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Of the greatest result of a row."""


@pytest.fixture(params=["XLA", "Triton"])
def backend(request, monkeypatch):
    if request.param == "XLA":

        def run(*args):
            return reference.run(QuantMatmulArgs(*args))

        return jax.jit(run, static_argnums=2, compiler_options=FAST)
    return triton_backend(monkeypatch, jax_triton, QuantMatmulArgs)


@pytest.mark.parametrize("format", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_dequantised(backend, format):
    for size in SIZES.values():
        check(backend, format, size, "float32")


@pytest.mark.parametrize("name", ["int4", "int8, groups of 64, minima", "fp8, a scale a row"])
def test_takes_bfloat16(backend, name):
    check(backend, WEIGHTS[name], SIZES["few"], "bfloat16")


def test_takes_float16_and_gives_float32(backend):
    check(backend, WEIGHTS["int4"], (19, 65, 320), "float16")
    check(backend, WEIGHTS["int8"], (3, 65, 320), "bfloat16", out_dtype="float32")


@pytest.mark.parametrize("format", CODES.values(), ids=CODES)
def test_codes_are_multiplied(backend, format):
    check(backend, format, SIZES["few"], "bfloat16")
    check(backend, format, SIZES["many"], "float32")


@pytest.mark.parametrize("format", ROUNDED.values(), ids=ROUNDED)
def test_inputs_are_rounded_first_where_codes_cannot_be_multiplied(backend, format):
    assert not format.of_codes
    check(backend, format, SIZES["few"], "float32")
    check(backend, format, SIZES["many"], "float32")


@settings(max_examples=6, deadline=None)
@given(
    M=st.integers(1, 70),
    N=st.integers(1, 140),
    K=st.integers(1, 600),
    format=st.sampled_from([*WEIGHTS.values(), *CODES.values(), *ROUNDED.values()]),
    seed=st.integers(0, 9),
)
def test_any_size(M, N, K, format, seed):
    with pytest.MonkeyPatch.context() as patch:
        check(
            triton_backend(patch, jax_triton, QuantMatmulArgs),
            format,
            (M, N, K),
            "float32",
            seed=seed,
        )


def check(backend, format, size, dtype, *, out_dtype=None, seed=1):
    (M, N, K), rng = size, np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((M, K)), dtype)
    codes, scales, minima = random_codes(format, N, K, rng)
    units = random_units(format, N, K, rng)
    needed = format.inputs is not None and format.inputs.needs_static
    static = STATIC[format.inputs.scales] if needed else None
    parts = {"minima": minima, "units": units, "static_inputs": static}
    weight = made(codes, scales, format, exponent=-3, **parts)
    out = backend(x, weight, jnp.dtype(out_dtype or dtype))

    assert out.dtype == (out_dtype or dtype)
    of_scales, of_minima = [1, 1] if units is None else spread_units(units, format, K)
    values = (numbers(codes, format) - format.zero) * spread(scales, format, K) * of_scales
    if minima is not None:
        values += spread(minima, format, K) * of_minima
    inputs = np.asarray(x, np.float64)
    if format.inputs is not None:
        inputs = rounded(inputs, format.inputs)
    expected = inputs @ (values * 2.0**-3).T
    error = np.abs(np.asarray(out, np.float64) - expected)
    assert (error <= TOLERANCE[dtype] * np.abs(expected).max(-1, keepdims=True)).all()


made = jax.jit(make_weight, static_argnums=2, static_argnames="exponent", compiler_options=FAST)


def random_codes(format, N, K, rng):
    groups = -(-K // format.group) if format.group else 1
    low, high = {"int4": (0, 16), "int8": (-128, 128), "fp8_e4m3": (0, 256)}[format.code]
    codes = rng.integers(low, high, (N, K))
    if format.code == "fp8_e4m3":
        codes[codes & 127 == 127] = 0  # NaN
    scales = rng.uniform(0.5, 1, (groups, N)).astype(format.scale_dtype)
    minima = rng.uniform(-9, 1, (groups, N)).astype(np.float16) if format.minima else None
    if format.span:
        scales, minima = (rng.integers(-128, 128, (groups, N), np.int8) for _ in range(2))
    return codes, scales, minima if format.minima else None


def random_units(format, N, K, rng):
    shape = format.units_shape(N, K)
    return None if shape is None else rng.uniform(0.5, 1, shape).astype(np.float16)


def numbers(codes, format):
    if format.code == "fp8_e4m3":
        codes = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64)


def spread(scales, format, K):
    """[groups, N] as [N, K]."""
    return np.repeat(scales.astype(np.float64).T, format.group or K, axis=1)[:, :K]


def spread_units(units, format, K):
    """Those of scales, and of minima, each [N, K]."""
    found = [np.repeat(part.astype(np.float64).T, format.span, axis=1)[:, :K] for part in units]
    return found[0], found[-1]


def rounded(x, format):
    """Each row and group to the nearest codes, by its own scale or a static one."""
    result, size = np.empty_like(x), format.group or x.shape[1]
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size].astype(np.float32)
        kept = np.abs(part) >= (format.threshold or np.inf)
        small = np.where(kept, 0, part)
        if format.threshold:
            small = small.astype(np.float16).astype(np.float32)
        scale, zero, scaled = scale_and_zero(small, format)
        codes = nearest(scaled + zero, format.code).astype(np.float64)
        result[:, start : start + size] = np.where(kept, part, (codes - zero) * scale)
    return result


MOST = {"int4": 7, "int8": 127, "fp8_e4m3": 448, "e2m1": 6}
STATIC = {"float32": np.float32([0.02, 7]), "e4m3": np.float32([900, 0])}


def scale_and_zero(x, format):
    """Of rows, and these over the scale."""
    most = np.float32(format.reach or MOST[format.code])
    if format.static:
        scale, zero = STATIC["float32"]
        return scale, zero * (not format.symmetric), x / scale
    if not format.symmetric:
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = (high - low) / np.float32(255)
        return scale, np.clip(np.rint(-128 - low / scale), -128, 127), x / scale
    largest = np.abs(x).max(-1, keepdims=True)
    scale = largest / most
    if format.scales == "float32" and not format.reach:
        return scale, 0, x * (most / largest)
    if format.scales == "e8m0":
        mantissa, exponent = np.frexp(scale * most)  # 0.5 to 1
        largest_code = np.floor(np.log2(most))
        scale = np.ldexp(1.0, exponent - 1 + (mantissa >= 0.875)) / 2**largest_code
    if format.scales == "e4m3":
        factor = STATIC["e4m3"][0]
        codes = np.minimum(scale * factor, 448).astype(ml_dtypes.float8_e4m3fn)
        scale = codes.astype(np.float32) / factor
    scale = scale.astype(np.float32)
    return scale, 0, x / scale


def nearest(x, code):
    most = MOST[code]
    if code == "e2m1":
        return np.clip(x, -most, most).astype(ml_dtypes.float4_e2m1fn)
    if code == "fp8_e4m3":
        return np.clip(x, -most, most).astype(ml_dtypes.float8_e4m3fn)
    return np.clip(np.rint(x), -most - 1, most)


def test_weights_with_a_zero_point_fit_as_minima():
    """As GPTQ and AWQ have them: (code - zero) * scale in groups of 128."""
    rng, format = np.random.default_rng(0), WEIGHTS["int4, groups of 128"]
    codes, zeros = rng.integers(0, 16, (5, 256)), rng.integers(0, 16, (2, 5))
    scales = rng.uniform(0.01, 0.02, (2, 5)).astype(np.float16)
    minima = (-zeros * scales.astype(np.float32)).astype(np.float16)
    weight = made(codes, scales, format, minima=minima)
    expected = (codes - np.repeat(zeros.T, 128, 1)) * spread(scales, format, 256)
    np.testing.assert_allclose(weight.dequantise(), expected, rtol=0, atol=2.0**-7 * 0.02)
    assert weight.codes.nbytes == codes.size // 2


@pytest.mark.parametrize("name", ["int4", "int4, groups of 16, minima, spans"])
def test_rows_are_those_of_the_whole(name):
    rng, format = np.random.default_rng(0), WEIGHTS[name]
    codes, scales, minima = random_codes(format, 9, 70, rng)
    units = random_units(format, 9, 70, rng)
    weight = made(codes, scales, format, minima=minima, units=units)
    ids = jnp.asarray([3, 8, 3])
    rows, whole = jax.jit(lambda w: (w.rows(ids), w.dequantise()))(weight)
    np.testing.assert_array_equal(rows, whole[ids])


def test_what_does_not_fit_is_refused():
    codes, scales = jnp.zeros((5, 64), jnp.int32), jnp.ones((2, 5))
    for format, minima in [
        (QuantFormat("int8", 64), None),  # one group
        (QuantFormat("int4", 32, minima=True), None),
        (QuantFormat("int8", 32), scales),
    ]:
        with pytest.raises(ValueError, match="expected"):
            make_weight(codes, scales, format, minima=minima)
    spans = QuantFormat("int8", 32, span=64)
    for format, units in [(spans, None), (QuantFormat("int8", 32), jnp.ones((1, 1, 5)))]:
        with pytest.raises(ValueError, match=r"units .*expected"):
            make_weight(codes, scales, format, units=units)
    with pytest.raises(ValueError, match="spans of 48"):
        make_weight(codes, scales, spans._replace(span=48), units=jnp.ones((1, 2, 5)))
    with pytest.raises(ValueError, match="zero is 8, allowed for int8: 0"):
        make_weight(codes, scales, QuantFormat("int8", 32, zero=8))
    with pytest.raises(ValueError, match="groups of 40"):
        make_weight(codes, scales, QuantFormat("int4", 40))
    static = QuantFormat("int8", 32, inputs=InputFormat("int8", static=True))
    with pytest.raises(ValueError, match="static inputs are missing"):
        make_weight(codes, scales, static)
    with pytest.raises(ValueError, match="static inputs are given"):
        make_weight(codes, scales, QuantFormat("int8", 32), static_inputs=jnp.ones(2))
