"""What is written of integer codes, read by other means."""

from __future__ import annotations

import numpy as np
import plain_references as references
import pytest

from llmjax.errors import ConfigError
from llmjax.quant.integers import pack, unpack
from llmjax.quantize import QuantizeConfig
from llmjax.quantize.formats import int_format
from llmjax.quantize.hub import Target
from llmjax.quantize.nearest import nearest

TARGET = Target("model.layers.0.mlp.down_proj.weight", ("mlp.down.weight",), (), 0.0)
CALIBRATED = {"calibration": "unused.txt"}


def formatted(method: str, **settings):
    return int_format(QuantizeConfig(method, **settings), np.dtype(np.float16))


def words(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of whole words, the lowest bits first."""
    shifts = np.arange(0, 32, bits)
    wide = packed.astype(np.int64)[:, :, None] >> shifts
    return (wide & (2**bits - 1)).reshape(len(packed), -1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_is_undone(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 64), np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits), codes)
    if bits != 3:
        np.testing.assert_array_equal(words(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_words(symmetric):
    format = formatted("awq", group_size=16, symmetric=symmetric, **CALIBRATED)
    weight, _ = references.matrices(0)
    codes = nearest(weight, format.grid, 16)
    tensors = format.coded(codes).tensors
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # of AutoAWQ's unpacking
    read = {
        name: words(tensors[name], 4).reshape(-1, 3, 8)[:, :, order].reshape(-1, 24)
        for name in ("qweight", "qzeros")
    }
    scales = tensors["scales"].astype(np.float32)
    values = (read["qweight"] - read["qzeros"].repeat(16, 0)) * scales.repeat(16, 0)
    np.testing.assert_array_equal(values.T, codes.values)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("method", "bits"), [("int4", 4), ("int8", 8)])
def test_packed_words(method, bits, symmetric):
    format = formatted(method, group_size=16, symmetric=symmetric)
    weight, _ = references.matrices(1, N=32)
    codes = nearest(weight, format.grid, 16)
    tensors = format.coded(codes).tensors
    half = 2 ** (bits - 1)
    numbers = words(tensors["weight_packed"], bits) - half
    if not symmetric:
        zeros = words(tensors["weight_zero_point"].T, bits).T - half
        numbers = numbers - zeros.repeat(16, 1)
    values = numbers * tensors["weight_scale"].astype(np.float32).repeat(16, 1)
    np.testing.assert_array_equal(values, codes.values)
    assert tensors["weight_shape"].tolist() == [32, 64]


def test_bytes():
    format = formatted("int8", activations="dynamic")
    weight, _ = references.matrices(2)
    tensors = format.coded(nearest(weight, format.grid, 64)).tensors
    values = tensors["weight"] * tensors["weight_scale"].astype(np.float32)
    wanted = references.nearest(weight, 8, 64, True, np.float16)
    np.testing.assert_allclose(values, wanted, atol=1.01 * float(tensors["weight_scale"].max()))
    assert np.mean(np.isclose(values, wanted, rtol=1e-5)) > 0.98


def test_groups_that_do_not_divide_name_the_layer():
    format = formatted("gptq", group_size=128, **CALIBRATED)
    with pytest.raises(ConfigError, match=r"mlp.down_proj has rows of 576 inputs.*64, 32, 16, 8"):
        format.group_of(TARGET, (576, 576))


def test_words_that_are_not_filled_name_the_layer():
    format = formatted("gptq", group_size=-1, bits=3, **CALIBRATED)
    with pytest.raises(ConfigError, match=r"mlp.down_proj is 24 x 64"):
        format.group_of(TARGET, (24, 64))
