"""compressed-tensors checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx
from quant_oracles import (
    LAYER,
    check_answers,
    check_choices,
    drop,
    edited,
    in_memory,
    opened,
    oracle,
    our_oracle,
    peer_answers,
    put,
)

from llmjax import LLM
from llmjax.checkpoint import load_model
from llmjax.errors import CheckpointFormatError, UnsupportedModelError
from llmjax.quant import read_matrices
from llmjax_kernels.quant_matmul import QuantWeight


@pytest.mark.parametrize("name", ["ct-w4a16-g32-gptq", "ct-awq-w4a16-g32", "ct-w8a16-channel"])
def test_weights_alone(name):
    check_answers(oracle(name), 1e-4)


@pytest.mark.parametrize("name", ["ct-int8-w8a8", "ct-fp8-static", "ct-fp8-dynamic"])
def test_inputs_are_rounded_as_the_peer_does(name):
    check_answers(oracle(name), 1e-4, flips=0.4)


@pytest.mark.parametrize("name", ["ct-nvfp4a16", "ct-mxfp4"])
def test_fp4_of_a_peer_that_computes_in_bfloat16(name):
    check_answers(oracle(name), 0.06)


@pytest.mark.parametrize("name", ["ct-mixed", "ct-int8-static-asym", "ct-int8-token-asym"])
def test_mixed_schemes_and_zero_points(name, tmp_path):
    check_answers(our_oracle(name, tmp_path), 1e-4, flips=0.3)


@pytest.mark.parametrize("name", ["ct-w4a8", "ct-fp8-block", "ct-nvfp4", "ct-mxfp4", "ct-mxfp8"])
def test_inputs_in_groups_and_4_bits(name, tmp_path):
    check_answers(our_oracle(name, tmp_path), 1e-4, flips=0.5)


def test_rounding_inputs_is_what_makes_the_difference(tmp_path):
    """It is done, and not only allowed for by a tolerance."""

    def leave_inputs(tensors, settings):
        for group in settings["config_groups"].values():
            group["input_activations"] = None

    folder = oracle("ct-int8-w8a8")
    rounded, plain = opened(folder), opened(edited(folder, tmp_path, leave_inputs))
    errors = {"rounded": [], "plain": []}
    for ids, logits, _ in peer_answers(folder):
        errors["rounded"] += list(np.abs(rounded(ids) - logits).max(-1))
        errors["plain"] += list(np.abs(plain(ids) - logits).max(-1))
    assert np.median(errors["rounded"]) < 1e-4
    assert np.median(errors["plain"]) > 0.03


def test_codes_are_kept_where_inputs_are_rounded():
    model = load_model(oracle("ct-fp8-static"), dtype="float32", progress=False)
    merged = nnx.merge(model.graphdef, model.state)
    assert isinstance(merged.layers[0].attn.q.weight.get_value(), QuantWeight)
    assert not isinstance(merged.head.weight.get_value(), QuantWeight)
    assert model.weight_type == "compressed-tensors fp8"


def test_the_scales_of_keys_and_values_ask_for_pages_of_8_bits(tmp_path):
    folder = our_oracle("ct-w8a16-kv8", tmp_path)
    model = load_model(folder, dtype="float32", progress=False)
    assert model.kv_format.name == "fp8_e4m3"
    # The peer rounds keys and values by scales of its own for all of them.
    check_answers(folder, 0.5)


def test_rows_of_fused_projections_are_dealt_out(tmp_path):
    """Phi-3 has them; its layers are Llama's otherwise."""

    def fuse(tensors, settings):
        for i in range(2):
            layer = f"model.layers.{i}"
            for names, fused in (
                ([f"self_attn.{p}_proj" for p in "qkv"], "self_attn.qkv_proj"),
                (["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj"),
            ):
                for part in ("weight", "weight_scale"):
                    parts = [tensors.pop(f"{layer}.{name}.{part}") for name in names]
                    tensors[f"{layer}.{fused}.{part}"] = np.concatenate(parts)
        group = settings["config_groups"]["group_0"]
        settings["config_groups"] = {
            "fused": group | {"targets": [r"re:.*\.(qkv|gate_up)_proj$"]},
            "others": group | {"targets": ["model.layers.0.mlp.down_proj", "re:.*_proj"]},
        }
        settings["ignore"] = ["re:.*head"]

    folder = edited(oracle("ct-int8-w8a8"), tmp_path, fuse)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    (folder / "config.json").write_text(json.dumps(config))
    check_answers(folder, 1e-4, flips=0.4)


def test_an_engine_without_native_kernels_rounds_inputs_too(monkeypatch):
    monkeypatch.setenv("LLMJAX_KERNELS", "xla")
    folder = oracle("ct-int8-w8a8")
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 8}
    sizes |= {"token_buckets": (64,), "seq_buckets": (2,), "background": False}
    with LLM(str(folder), dtype="float32", **sizes) as llm:
        check_choices(llm, folder)


def in_order(order):
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (6, 64)), rng.random((6, 2), np.float32)
    groups = np.arange(64) // 32
    tensors = {
        "x.weight_packed": packed(codes, 4),
        "x.weight_shape": np.int64([6, 64]),
        "x.weight_scale": scales,
        "x.weight_g_idx": groups[order].astype(np.int32),
    }
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    [matrix] = matrices(tensors, weights).values()
    return matrix.dequantise(0, 6), (codes - 8) * scales[:, groups[order]]


def test_inputs_that_are_in_groups_by_activation():
    """Written by hand: compressed-tensors has taken it out again."""
    found, expected = in_order(np.random.default_rng(1).permutation(64))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    found, expected = in_order(np.arange(64))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_any_number_of_bits_packed_closely_and_apart(bits):
    rng = np.random.default_rng(0)
    for apart, (N, K) in ((False, (5, 70)), (False, (33, 96)), (True, (33, 96))):
        codes, scales = rng.integers(0, 2**bits, (N, K)), rng.random((N, 1), np.float32)
        zeros = rng.integers(0, 2**bits, (N, 1))
        tensors = {
            "x.weight_packed": packed(codes, bits, apart),
            "x.weight_shape": np.int64([N, K]),
            "x.weight_scale": scales,
            "x.weight_zero_point": packed(zeros.T, bits, apart).T,
        }
        weights = {"num_bits": bits, "strategy": "channel", "symmetric": False}
        [matrix] = matrices(tensors, weights).values()
        np.testing.assert_allclose(
            matrix.dequantise(1, 4), ((codes - zeros) * scales)[1:4], 1e-5, 1e-4
        )


def packed(codes, bits, apart=False):
    """Codes as bits of int32, one after another, or as many in a word as fit."""
    rows = []
    for row in codes:
        text = "".join(f"{code:0{bits}b}"[::-1] for code in row)
        if apart:
            size = 32 // bits * bits
            words = [text[i : i + size].ljust(32, "0") for i in range(0, len(text), size)]
        else:
            words = [text[i : i + 32].ljust(32, "0") for i in range(0, len(text), 32)]
        rows.append([int(word[::-1], 2) for word in words])
    return np.array(rows, np.uint32).view(np.int32)


def matrices(tensors, weights, **settings):
    return read_matrices(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
        }
        | settings,
        in_memory(tensors),
    )


def set_weights(**changes):
    def edit(tensors, settings):
        settings["config_groups"]["group_0"]["weights"].update(changes)

    return edit


def set_all(**changes):
    return lambda tensors, settings: settings.update(changes)


INPUTS = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}


def set_inputs(**changes):
    def edit(tensors, settings):
        settings["config_groups"]["group_0"]["input_activations"] = INPUTS | changes

    return edit


W4, W8A8, NVFP4 = "ct-awq-w4a16-g32", "ct-int8-w8a8", "ct-nvfp4a16"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (W4, drop("weight_scale"), f"layer {LAYER} has no weight_scale"),
        (W4, drop("weight_packed"), f"layer {LAYER} has no weight_packed"),
        (W4, drop("weight_shape"), f"layer {LAYER} has no weight_shape"),
        (W4, drop("weight_zero_point"), f"layer {LAYER} has no weight_zero_point"),
        (W4, put("weight_packed", lambda w: w[:, 1:]), f"layer {LAYER}: weight_packed has 7"),
        (W4, put("weight_scale", lambda w: w[1:]), f"layer {LAYER}: weight_scale is BF16"),
        (W4, put("weight_scale", lambda w: w.astype(np.int8)), "expected F16 or BF16 or F32"),
        (W4, put("weight_shape", lambda w: w * 0), f"layer {LAYER}: weight_shape says"),
        (W4, set_weights(group_size=48), "no whole groups of 48"),
        (W4, set_weights(actorder="group"), "has no weight_g_idx"),
        (W8A8, drop("weight_scale"), f"layer {LAYER} has no weight_scale"),
        (W8A8, set_inputs(), "has no input_scale"),
        (NVFP4, drop("weight_global_scale"), f"layer {LAYER} has no weight_global_scale"),
        (NVFP4, put("weight_global_scale", lambda w: w * 0), "weight_global_scale is 0"),
        (W4, set_all(ignore=[LAYER]), f"layer {LAYER} has quantised tensors, but"),
        (W4, set_all(config_groups={}), "no group of quantization_config's config_groups"),
        (W4, set_all(config_groups={"W4A16": ["Linear"]}), "expected an object"),
        (W4, set_all(config_groups=3), "config_groups is 3, expected an object"),
        (W4, set_all(ignore=["re:("]), "has a value that means nothing: missing"),
        (W4, set_all(sparsity_config="none"), "has a value that means nothing"),
        (W8A8, set_inputs(symmetric=False), "has no input_scale"),
    ],
)
def test_a_bad_file_is_told_by_its_layer(name, edit, message, tmp_path):
    with pytest.raises(CheckpointFormatError, match=message):
        opened(edited(oracle(name), tmp_path, edit))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_all(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is"),
        (set_all(transform_config={"config_groups": {}}), "transform_config is"),
        (set_all(kv_cache_scheme={"type": "float", "num_bits": 4}), "kv_cache_scheme is"),
        (set_all(quant_method="hqq"), "quant_method is 'hqq', allowed: 'gptq', 'awq', .*'mxfp4'"),
        (set_weights(num_bits=9), r"config_groups.group_0.weights.num_bits is 9, allowed: 2, 3"),
        (set_weights(type="posit"), "weights.type is 'posit', allowed: 'int', 'float'"),
        (set_weights(strategy="token"), "weights.strategy is 'token', allowed: 'tensor'"),
        (set_weights(actorder="sideways"), "weights.actorder is 'sideways'"),
        (set_inputs(num_bits=6), "input_activations.num_bits is"),
        (set_inputs(strategy="channel"), "input_activations.strategy is 'channel'"),
    ],
)
def test_what_is_not_implemented_is_refused(edit, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        opened(edited(oracle(W4), tmp_path, edit))


def test_outputs_that_are_rounded_are_refused(tmp_path):
    def edit(tensors, settings):
        settings["config_groups"]["group_0"]["output_activations"] = INPUTS

    with pytest.raises(UnsupportedModelError, match="output_activations is"):
        opened(edited(oracle(W4), tmp_path, edit))
