"""FP8 checkpoints of DeepSeek's and Qwen's kind, of AutoFP8, and of ModelOpt with NVFP4."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quant_oracles import (
    LAYER,
    check_answers,
    drop,
    edited,
    in_memory,
    opened,
    oracle,
    our_oracle,
    put,
)

from llmjax.errors import CheckpointFormatError, UnsupportedModelError
from llmjax.quant import read_matrices

E4M3 = ml_dtypes.float8_e4m3fn


def renamed(tensors, old, new, change=lambda x: x):
    for name in [n for n in tensors if n.endswith(f".{old}")]:
        tensors[name.removesuffix(old) + new] = change(tensors.pop(name))


def as_deepseek(tensors, settings):
    """What compressed-tensors calls its block scheme says the same by other names."""
    renamed(tensors, "weight_scale", "weight_scale_inv", lambda s: s.astype(np.float32))
    settings.clear()
    settings |= {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def as_autofp8(tensors, settings):
    renamed(tensors, "weight_scale", "weight_scale", lambda s: s.astype(np.float32).reshape(()))
    renamed(tensors, "input_scale", "input_scale", lambda s: s.astype(np.float32).reshape(()))
    settings.clear()
    settings |= {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": None,
    }


def as_modelopt_fp8(tensors, settings):
    as_autofp8(tensors, settings)
    settings |= {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def as_modelopt_nvfp4(tensors, settings):
    renamed(tensors, "weight_packed", "weight")
    renamed(tensors, "weight_global_scale", "weight_scale_2", lambda s: (1 / s).reshape(()))
    renamed(tensors, "input_global_scale", "input_scale", lambda s: (1 / s).reshape(()))
    settings.clear()
    settings |= {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def test_blocks_of_128(tmp_path):
    folder = edited(our_oracle("ct-fp8-block", tmp_path), tmp_path, as_deepseek)
    check_answers(folder, 1e-4, flips=0.5)


@pytest.mark.parametrize("change", [as_autofp8, as_modelopt_fp8])
def test_one_static_scale_each(change, tmp_path):
    check_answers(edited(oracle("ct-fp8-static"), tmp_path, change), 1e-4, flips=0.4)


def test_nvfp4_of_modelopt(tmp_path):
    folder = edited(our_oracle("ct-nvfp4", tmp_path), tmp_path, as_modelopt_nvfp4)
    check_answers(folder, 1e-4, flips=0.5)


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    folder = edited(oracle("ct-fp8-static"), tmp_path, as_modelopt_fp8)
    config = (folder / "config.json").read_text().replace("quantization_config", "unread")
    (folder / "config.json").write_text(config)
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", '
        '"kv_cache_quant_algo": null, "exclude_modules": ["lm_head"]}}'
    )
    check_answers(folder, 1e-4, flips=0.4)


@pytest.mark.parametrize("powers", [False, True])
def test_blocks_that_are_cut_short(powers):
    """Rows and inputs that are no whole blocks, as DeepSeek's kv_a_proj has them."""
    rng, (N, K) = np.random.default_rng(0), (130, 192)
    codes = rng.integers(0, 0x7F, (N, K), np.uint8).view(E4M3)
    scales = rng.random((2, 2), np.float32)
    stored = scales
    if powers:
        stored = rng.integers(120, 130, (2, 2), np.uint8)
        scales, stored = 2.0 ** (stored - 127.0), stored.view(ml_dtypes.float8_e8m0fnu)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {"x.weight": codes, "x.weight_scale_inv": stored}
    [matrix] = read_matrices(settings, in_memory(tensors)).values()
    expected = codes.astype(np.float32) * np.repeat(np.repeat(scales, 128, 0), 128, 1)[:N, :K]
    np.testing.assert_allclose(matrix.dequantise(0, N), expected, rtol=1e-6)
    np.testing.assert_allclose(matrix.dequantise(127, 130), expected[127:], rtol=1e-6)
    assert matrix.coding.group == 64
    assert (matrix.inputs.code, matrix.inputs.group) == ("fp8_e4m3", 128)


def test_a_scale_for_each_row():
    codes = np.arange(12, dtype=np.uint8).reshape(3, 4).view(E4M3)
    tensors = {"x.weight": codes, "x.weight_scale": np.float32([[1], [2], [4]])}
    [matrix] = read_matrices({"quant_method": "fp8"}, in_memory(tensors)).values()
    expected = codes.astype(np.float32) * [[1], [2], [4]]
    np.testing.assert_array_equal(matrix.dequantise(0, 3), expected)


def shorten(part):
    return put(part, lambda values: np.concatenate([np.atleast_1d(values)] * 2))


def setting(**changes):
    return lambda tensors, settings: settings.update(changes)


STATIC, BLOCK, NVFP4 = "ct-fp8-static", "ct-fp8-block", "ct-nvfp4"


@pytest.mark.parametrize(
    ("name", "base", "edit", "message"),
    [
        (STATIC, as_autofp8, drop("weight_scale"), f"layer {LAYER} has no weight_scale"),
        (STATIC, as_autofp8, drop("weight"), f"layer {LAYER} has no weight, "),
        (STATIC, as_autofp8, drop("input_scale"), f"layer {LAYER} has no input_scale"),
        (STATIC, as_autofp8, shorten("weight_scale"), f"layer {LAYER}: weight_scale is F32 .2"),
        (STATIC, as_autofp8, setting(weight_block_size=[128]), "weight_block_size is .128."),
        (BLOCK, as_deepseek, drop("weight_scale_inv"), f"layer {LAYER} has no weight_scale_inv"),
        (BLOCK, as_deepseek, shorten("weight_scale_inv"), f"layer {LAYER}: weight_scale_inv is"),
        (BLOCK, as_deepseek, setting(weight_block_size=[0, 128]), "weight_block_size is"),
        (STATIC, as_modelopt_fp8, drop("weight_scale"), f"layer {LAYER} has no weight_scale"),
        (STATIC, as_modelopt_fp8, drop("input_scale"), f"layer {LAYER} has no input_scale"),
        (NVFP4, as_modelopt_nvfp4, drop("weight_scale_2"), f"layer {LAYER} has no weight_scale_2"),
        (NVFP4, as_modelopt_nvfp4, shorten("weight_scale"), f"layer {LAYER}: weight_scale is F8"),
    ],
)
def test_a_bad_file_is_told_by_its_layer(name, base, edit, message, tmp_path):
    def change(tensors, settings):
        base(tensors, settings)
        edit(tensors, settings)

    folder = oracle(name) if name == STATIC else our_oracle(name, tmp_path)
    with pytest.raises(CheckpointFormatError, match=message):
        opened(edited(folder, tmp_path, change))


@pytest.mark.parametrize(
    ("base", "edit", "message"),
    [
        (as_autofp8, setting(activation_scheme="weekly"), "activation_scheme is 'weekly'"),
        (as_autofp8, setting(fmt="e5m2"), "fmt is 'e5m2', allowed: 'e4m3'"),
        (
            as_modelopt_fp8,
            setting(quant_algo="W4A8_AWQ"),
            "quant_algo is 'W4A8_AWQ', allowed: 'FP8'",
        ),
        (as_modelopt_fp8, setting(kv_cache_quant_algo="NVFP4"), "kv_cache_scheme is 'NVFP4'"),
    ],
)
def test_what_is_not_implemented_is_refused(base, edit, message, tmp_path):
    def change(tensors, settings):
        base(tensors, settings)
        edit(tensors, settings)

    with pytest.raises(UnsupportedModelError, match=message):
        opened(edited(oracle(STATIC), tmp_path, change))
