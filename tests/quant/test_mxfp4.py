"""MXFP4 as gpt-oss has it."""

from __future__ import annotations

import numpy as np
import pytest
from quant_oracles import check_answers, edited, in_memory, oracle

from llmjax.errors import CheckpointFormatError
from llmjax.quant import read_matrices

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def random_tensors(*outer):
    rng = np.random.default_rng(0)
    return {
        "x.down_proj_blocks": rng.integers(0, 256, (*outer, 2, 16), np.uint8),
        "x.down_proj_scales": rng.integers(120, 130, (*outer, 2), np.uint8),
    }


def values(tensors):
    blocks = tensors["x.down_proj_blocks"]
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    signed = np.where(codes & 8, -1, 1) * NUMBERS[codes & 7]
    scaled = signed * 2.0 ** (tensors["x.down_proj_scales"].astype(int)[..., None] - 127)
    return scaled.reshape(-1, 64)


@pytest.mark.parametrize("outer", [(6,), (3, 5)])
def test_blocks_of_a_matrix_or_of_several_experts(outer):
    tensors = random_tensors(*outer)
    found = read_matrices(SETTINGS, in_memory(tensors))
    matrix, expected = found["x.down_proj"], values(tensors)
    assert matrix.shape == expected.shape
    np.testing.assert_array_equal(matrix.dequantise(0, len(expected)), expected)
    np.testing.assert_array_equal(matrix.dequantise(2, 6), expected[2:6])


def test_a_model_of_dense_matrices(tmp_path):
    """What compressed-tensors calls mxfp4, by other names."""

    def change(tensors, settings):
        for name in [n for n in tensors if n.endswith("weight_packed")]:
            packed, stem = tensors.pop(name), name.removesuffix("_packed")
            tensors[f"{stem}_blocks"] = packed.reshape(len(packed), -1, 16)
            tensors[f"{stem}_scales"] = tensors.pop(f"{stem}_scale")
        settings.clear()
        settings |= SETTINGS

    check_answers(edited(oracle("ct-mxfp4"), tmp_path, change), 0.06)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blocks", None, "layer x.down_proj has no x.down_proj_blocks"),
        ("scales", None, "layer x.down_proj has no x.down_proj_scales"),
        ("blocks", lambda b: b[..., :8], "layer x.down_proj: _blocks is U8"),
        ("blocks", lambda b: b.astype(np.int32), "layer x.down_proj: _blocks is I32"),
        (
            "scales",
            lambda s: s[:, :1],
            "layer x.down_proj: _scales is U8 .6, 1., expected U8 .6, 2.",
        ),
    ],
)
def test_a_bad_file_is_told_by_its_layer(name, change, message):
    tensors = random_tensors(6)
    stored = tensors.pop(f"x.down_proj_{name}")
    if change is not None:
        tensors[f"x.down_proj_{name}"] = change(stored)
    with pytest.raises(CheckpointFormatError, match=message):
        read_matrices(SETTINGS, in_memory(tensors))
