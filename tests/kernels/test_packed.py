"""Weights survive packing: as they were, or with scales in float16."""

from __future__ import annotations

import numpy as np
import pytest
from random_weights import FLOATS, block_size, random_rows, unpacked

from llmjax_kernels import packed
from llmjax_kernels.packed import Arena, pack_float, pack_gguf
from llmjax_kernels.weight_format import GGUF_FORMATS, float_format, gguf_format

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
"""Types whose blocks hold the float16 scales themselves."""
HALF = 2.0**-11
"""The relative error of rounding to float16."""


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("N", [1, 15, 16, 17, 83])
@pytest.mark.parametrize("type_name", GGUF_FORMATS)
def test_unpacks_to_what_the_gguf_package_dequantises(type_name, N, blocks):
    weight = random_rows(type_name, N, blocks * block_size(type_name), np.random.default_rng(N))
    stored = weight.pack()
    assert stored.shape == weight.values.shape
    found = np.asarray(unpacked(stored))
    if type_name in EXACT:
        np.testing.assert_array_equal(found, weight.values)
    bound = HALF * (np.abs(weight.product) + np.abs(weight.minimum))
    # A scale far below the greatest becomes subnormal: no finer than 2^-24 of the unit.
    bound += 2.0 ** (stored.exponent - 25) * 127
    assert (np.abs(found - weight.values) <= bound).all()


@pytest.mark.parametrize("type_name", GGUF_FORMATS)
@pytest.mark.parametrize("scale", [6e-8, 1e-5, 1000.0])
def test_scales_of_any_size(type_name, scale):
    weight = random_rows(type_name, 17, 256, np.random.default_rng(0), scale)
    found = np.asarray(unpacked(weight.pack()))
    bound = 2 * HALF * (np.abs(weight.product) + np.abs(weight.minimum))
    assert (np.abs(found - weight.values) <= bound).all()


@pytest.mark.parametrize("type_name", GGUF_FORMATS)
def test_a_weight_of_zeros_and_one_of_no_rows(type_name):
    weight = random_rows(type_name, 5, 256, np.random.default_rng(0), 0.0)
    np.testing.assert_array_equal(unpacked(weight.pack()), np.zeros((5, 256)))
    assert unpacked(pack_gguf(type_name, weight.rows[:0], 256)).shape == (0, 256)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (16, 32), (17, 33), (83, 65)])
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_floats_are_packed_as_they_are(dtype, shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    weight = pack_float(values)
    assert weight.shape == shape
    np.testing.assert_array_equal(unpacked(weight), values.astype(np.float32))
    np.testing.assert_array_equal(weight.unpack()[1:, 0], values[1:, 0].astype(np.float32))


def test_weights_share_an_arena(monkeypatch):
    """One after the other, each in pieces of few rows."""
    monkeypatch.setattr(packed, "BLOCK_WEIGHTS", 1)
    rng = np.random.default_rng(0)
    floats = rng.standard_normal((83, 33)).astype(np.float32)
    gguf = {name: random_rows(name, 83, 256, rng) for name in GGUF_FORMATS}
    sizes = [float_format(dtype).nbytes(83, 33) for dtype in FLOATS.values()]
    sizes += [GGUF_FORMATS[name][1].nbytes(83, 256) for name in gguf]
    arena = Arena(sum(sizes))
    weights = {name: arena.pack_float(floats, 33, dtype) for name, dtype in FLOATS.items()}
    weights |= {name: arena.pack_gguf(name, w.rows, 256) for name, w in gguf.items()}
    weights = arena.to_device(weights)
    assert [w.nbytes for w in weights.values()] == sizes
    for name, dtype in FLOATS.items():
        expected = floats.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(unpacked(weights[name]), expected)
    for name, w in gguf.items():
        np.testing.assert_array_equal(unpacked(weights[name]), unpacked(w.pack()))


def test_which_gguf_tensors_stay_quantised():
    assert gguf_format("Q4_1", 96) == GGUF_FORMATS["Q4_1"][1]
    assert gguf_format("Q4_1", 100) is None
    assert gguf_format("IQ2_XXS", 256) is None
    assert gguf_format("F16", 256) is None
