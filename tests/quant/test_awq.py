"""AWQ checkpoints: both packings, with zero points and without."""

from __future__ import annotations

import json

import numpy as np
import pytest
from quant_files import awq_gemm_tensors, awq_gemv_tensors, make_folder
from quant_oracles import assert_as_far_as_bfloat16, oracle

from llmjax.checkpoint.detect import open_checkpoint
from llmjax.errors import CheckpointFormatError, UnsupportedModelError

LAYER = "model.layers.1.mlp.down_proj"
SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
VERSIONS = {"gemm": awq_gemm_tensors, "gemv": awq_gemv_tensors}


def test_logits_are_those_of_gptqmodel():
    """Which computes in bfloat16: it is as far from them as bfloat16 is."""
    folder = oracle("awq-w4-g32")
    assert_as_far_as_bfloat16(folder)


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize("group", [16, 32, -1])
@pytest.mark.parametrize("version", VERSIONS)
def test_values_are_what_the_codes_say(tmp_path, tiny_model, version, group, symmetric):
    settings = SETTINGS | {"version": version, "group_size": group, "zero_point": not symmetric}
    how = {"group": group, "symmetric": symmetric}
    folder = make_folder(tmp_path, tiny_model, settings, VERSIONS[version], **how)
    checkpoint = open_checkpoint(folder.write())
    assert len(folder.layers) == len(checkpoint.matrices) == 14
    for layer, expected in folder.layers.items():
        matrix = checkpoint.matrices[f"{layer}.weight"]
        assert matrix.coding.minima == (not symmetric)
        values = checkpoint.read(f"{layer}.weight")
        np.testing.assert_allclose(values, expected.values, rtol=1e-5, atol=1e-7)
        N = len(values)
        pieces = [matrix.dequantise(a, min(a + 7, N)) for a in range(0, N, 7)]
        np.testing.assert_array_equal(np.concatenate(pieces), values)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "gemm"},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4}
        | {"group_size": 32},
    ],
)
def test_other_spellings(tmp_path, tiny_model, settings):
    folder = make_folder(tmp_path, tiny_model, settings, awq_gemm_tensors)
    checkpoint = open_checkpoint(folder.write())
    expected = folder.layers[LAYER].values
    np.testing.assert_allclose(checkpoint.read(f"{LAYER}.weight"), expected, rtol=1e-6)


def test_settings_in_a_file_of_their_own(tmp_path, tiny_model):
    folder = make_folder(tmp_path, tiny_model, {}, awq_gemm_tensors)
    settings = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    assert len(open_checkpoint(folder.write()).matrices) == 14


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"version": "gemv_fast"}, "version is 'gemv_fast', allowed: 'gemm', 'gemv'"),
            ({"bits": 8}, r"bits of layer model\.layers\.0.* is 8, allowed: 4"),
        ],
    )
    def test_what_is_unknown(self, tmp_path, tiny_model, changes, said):
        folder = make_folder(tmp_path, tiny_model, SETTINGS | changes, awq_gemm_tensors)
        with pytest.raises(UnsupportedModelError, match=said):
            open_checkpoint(folder.write())

    @pytest.mark.parametrize(
        ("version", "part", "change", "said"),
        [
            ("gemm", "scales", None, "has no scales"),
            ("gemm", "qzeros", None, "has no qzeros"),
            ("gemm", "qzeros", lambda x: x[1:], r"qzeros is I32 \[2, 8\], expected I32 \[3, 8\]"),
            ("gemm", "scales", lambda x: x[:, 1:], r"scales is F16 \[3, 63\]"),
            ("gemm", "qweight", lambda x: x[1:], "rows of 95 are no whole groups of 32"),
            ("gemv", "scales", None, "has no scales"),
            ("gemv", "qzeros", lambda x: x[1:], r"qzeros is I32 \[63, 4\], expected I32 \[64"),
            ("gemv", "scales", lambda x: x[:, 1:], r"scales is F16 \[64, 31\]"),
        ],
    )
    def test_tensors(self, tmp_path, tiny_model, version, part, change, said):
        settings = SETTINGS | {"version": version}
        folder = make_folder(tmp_path, tiny_model, settings, VERSIONS[version])
        value = folder.tensors.pop(f"{LAYER}.{part}")
        if change is not None:
            folder.tensors[f"{LAYER}.{part}"] = change(value)
        with pytest.raises(CheckpointFormatError, match=rf"layer {LAYER}.*{said}"):
            open_checkpoint(folder.write())
