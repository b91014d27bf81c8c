"""GPTQ checkpoints: every width, zero points, act-order, and what may be said of layers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from quant_files import gptq_tensors, gptq_v2_tensors, make_folder, quantise, random_layer
from quant_oracles import assert_as_far_as_bfloat16, oracle

from llmjax.checkpoint.detect import open_checkpoint
from llmjax.errors import CheckpointFormatError, UnsupportedModelError

LAYER = "model.layers.1.mlp.down_proj"
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}


@pytest.mark.parametrize("name", ["gptq-w4-g32", "gptq-w4-asym", "gptq-w8-g32"])
def test_logits_are_those_of_gptqmodel(name):
    """Which computes in bfloat16: it is as far from them as bfloat16 is."""
    folder = oracle(name)
    assert_as_far_as_bfloat16(folder)


@pytest.mark.parametrize("act_order", [False, True], ids=["", "act-order"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize("group", [16, 32, -1])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values_are_what_the_codes_say(
    tmp_path, tiny_model, bits, stored, group, symmetric, act_order
):
    settings = SETTINGS | {"bits": bits, "group_size": group, "checkpoint_format": stored}
    pack_as = gptq_tensors if stored == "gptq" else gptq_v2_tensors
    how = {"bits": bits, "group": group, "symmetric": symmetric, "act_order": act_order}
    folder = make_folder(tmp_path, tiny_model, settings, pack_as, **how)
    checkpoint = open_checkpoint(folder.write())
    assert len(folder.layers) == len(checkpoint.matrices) == 14
    for layer, expected in folder.layers.items():
        matrix = checkpoint.matrices[f"{layer}.weight"]
        N, K = expected.codes.shape
        assert matrix.coding.minima == (not symmetric)
        assert (matrix.order is not None) == (act_order and group != -1)
        np.testing.assert_allclose(
            checkpoint.read(f"{layer}.weight"), expected.values, rtol=1e-5, atol=1e-7
        )
        pieces = [matrix.dequantise(a, min(a + 7, N)) for a in range(0, N, 7)]
        np.testing.assert_array_equal(np.concatenate(pieces), matrix.dequantise(0, N))
        assert checkpoint.quantised_rows(f"{layer}.weight", 3, 5).shape[1] >= K + 4


def write(tmp_path, tiny_model, **changes):
    folder = make_folder(tmp_path, tiny_model, SETTINGS | changes, gptq_tensors)
    return folder, open_checkpoint(folder.write())


@pytest.mark.parametrize("skipped", [{}, {"-:model.layers.0": {}}])
def test_layers_with_settings_of_their_own(tmp_path, tiny_model, skipped):
    """The first expression that matches counts."""
    other = {"bits": 8, "group_size": 16, "sym": True}
    dynamic = skipped | {r"+:.*\.1\.mlp\.down": other, r".*\.mlp\.down": {"bits": 2}}
    folder = make_folder(tmp_path, tiny_model, SETTINGS | {"dynamic": dynamic}, gptq_tensors)
    rng = np.random.default_rng(1)
    folder.layers[LAYER] = random_layer(rng, 64, 96, 8, 16)
    first = LAYER.replace("1", "0")
    if not skipped:
        folder.layers[first] = random_layer(rng, 64, 96, 2, 32)
    for layer in (LAYER, first):
        quantise(folder, layer, gptq_tensors)
    checkpoint = open_checkpoint(folder.write())
    assert checkpoint.tensors[f"{LAYER}.weight"].type_name == "GPTQ 8 bits"
    for layer, expected in folder.layers.items():
        np.testing.assert_allclose(checkpoint.read(f"{layer}.weight"), expected.values, rtol=1e-6)


def test_some_layers_and_the_head(tmp_path, tiny_model):
    """What is quantised is what has codes, whatever the settings list."""
    settings = SETTINGS | {"lm_head": True, "modules_in_block_to_quantize": [["mlp.down_proj"]]}
    folder = make_folder(tmp_path, tiny_model, settings, gptq_tensors)
    plain = "model.layers.0.self_attn.q_proj"
    expected = folder.layers.pop(plain).values
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del folder.tensors[f"{plain}.{part}"]
    folder.tensors[f"{plain}.weight"] = expected
    N, K = folder.tensors["lm_head.weight"].shape
    folder.layers["lm_head"] = random_layer(np.random.default_rng(1), N, K)
    quantise(folder, "lm_head", gptq_tensors)
    checkpoint = open_checkpoint(folder.write())
    assert checkpoint.tensors[f"{plain}.weight"].type_name == "F32"
    np.testing.assert_array_equal(checkpoint.read(f"{plain}.weight"), expected)
    head = folder.layers["lm_head"].values
    np.testing.assert_allclose(checkpoint.read("lm_head.weight"), head, rtol=1e-6)


def test_settings_in_a_file_of_their_own(tmp_path, tiny_model):
    """AutoGPTQ's, which names no method."""
    folder = make_folder(tmp_path, tiny_model, {}, gptq_tensors)
    settings = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert len(open_checkpoint(folder.write()).matrices) == 14


@pytest.mark.parametrize(
    ("packing", "pack_as"),
    [
        ("auto_round:auto_gptq", gptq_tensors),
        ("auto_round:gptqmodel", gptq_v2_tensors),
        ("auto_round", gptq_v2_tensors),
    ],
)
def test_auto_round(tmp_path, tiny_model, packing, pack_as):
    settings = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"}
    settings |= {"bits": 4, "group_size": 32, "extra_config": {LAYER: {"bits": 8}}}
    folder = make_folder(tmp_path, tiny_model, settings, pack_as, symmetric=False)
    folder.layers[LAYER] = random_layer(np.random.default_rng(1), 64, 96, 8)
    quantise(folder, LAYER, pack_as)
    checkpoint = open_checkpoint(folder.write())
    for layer, expected in folder.layers.items():
        np.testing.assert_allclose(
            checkpoint.read(f"{layer}.weight"), expected.values, rtol=1e-5, atol=1e-7
        )


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"quant_method": "hqq"}, "quant_method is 'hqq', allowed: "),
            ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', allowed: 'gptq', "),
            ({"bits": 5}, r"bits of layer model\.layers\.0.* is 5, allowed: 2, 3, 4, 8"),
            ({"bits": None}, r"bits of layer model\.layers\.0.* is None"),
            ({"dynamic": {".*down": {"bits": 7}}}, r"bits of layer .*down_proj is 7, allowed"),
            ({"quant_method": "auto-round", "packing_format": "auto_round:x"}, "packing_format"),
            ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ],
    )
    def test_what_is_unknown(self, tmp_path, tiny_model, changes, said):
        with pytest.raises(UnsupportedModelError, match=said):
            write(tmp_path, tiny_model, **changes)

    @pytest.mark.parametrize("group", [25, 0, -2, 128, "32", None, True])
    def test_groups(self, tmp_path, tiny_model, group):
        with pytest.raises(CheckpointFormatError, match=r"layer model\.layers\.\d.*group"):
            write(tmp_path, tiny_model, group_size=group)

    @pytest.mark.parametrize(
        ("part", "change", "said"),
        [
            ("scales", None, "has no scales"),
            ("qzeros", None, "has no qzeros"),
            ("scales", lambda x: x[:2], r"scales is F16 \[2, 64\], expected .*\[3, 64\]"),
            ("scales", lambda x: x.astype(np.int32), "scales is I32"),
            ("qzeros", lambda x: x[:, 1:], r"qzeros is I32 \[3, 7\], expected I32 \[3, 8\]"),
            ("qweight", lambda x: x[:, 1:], "does not hold whole rows of 4 bits"),
            ("qweight", lambda x: x.astype(np.int8), "qweight is I8"),
            ("qweight", lambda x: x[0], r"qweight is I32 \[64\]"),
            ("g_idx", lambda x: x[1:], r"g_idx is I32 \[95\], expected"),
        ],
    )
    def test_tensors(self, tmp_path, tiny_model, part, change, said):
        folder = make_folder(tmp_path, tiny_model, SETTINGS, gptq_tensors)
        value = folder.tensors.pop(f"{LAYER}.{part}")
        if change is not None:
            folder.tensors[f"{LAYER}.{part}"] = change(value)
        with pytest.raises(CheckpointFormatError, match=rf"layer {LAYER}.*{said}"):
            open_checkpoint(folder.write())

    def test_groups_of_different_sizes(self, tmp_path, tiny_model):
        folder = make_folder(tmp_path, tiny_model, SETTINGS, gptq_tensors)
        folder.tensors[f"{LAYER}.g_idx"] = np.minimum(np.arange(96) // 16, 2).astype(np.int32)
        checkpoint = open_checkpoint(folder.write())
        with pytest.raises(CheckpointFormatError, match=rf"layer {LAYER}: g_idx does not put 32"):
            checkpoint.read(f"{LAYER}.weight")
