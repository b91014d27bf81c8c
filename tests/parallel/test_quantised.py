"""Quantised weights stay so on several devices, and say what they say on one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from llmjax_kernels import native

from .test_pipeline import assert_same as assert_same_in_stages
from .test_pipeline import in_stages
from .test_tensor_parallel import assert_same, spread
from .virtual import on_virtual_devices

sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))
from quant_files import awq_gemm_tensors, gptq_tensors, make_folder
from quant_oracles import our_oracle
from tiny_files import TINY_TOKENIZER, hf_tensors, write_folder

K_QUANTS = Path(__file__).parents[1] / "models" / "fixtures" / "gguf" / "llama-q4_k_m.gguf"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 96, 9, 3, 32, 192
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
CASES = {
    "AWQ": (AWQ, awq_gemm_tensors, {"symmetric": False}),
    # Groups of three heads, which are cut where two are together.
    "groups of heads": (GPTQ | {"group_size": 96}, gptq_tensors, {"group": 96}),
    "act-order": (GPTQ, gptq_tensors, {"act_order": True}),
    "whole rows": (
        GPTQ | {"bits": 8, "group_size": -1},
        gptq_tensors,
        {"bits": 8, "group": -1, "symmetric": False},
    ),
}
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
"""A tiny Llama with SmolLM2's 9 heads to 3 key-value heads."""


def random_tensors() -> dict[str, np.ndarray]:
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "q_proj": (width, HIDDEN),
        "k_proj": (kv_width, HIDDEN),
        "v_proj": (kv_width, HIDDEN),
        "o_proj": (HIDDEN, width),
        "gate_proj": (MLP, HIDDEN),
        "up_proj": (MLP, HIDDEN),
        "down_proj": (HIDDEN, MLP),
    }
    rng, tensors = np.random.default_rng(0), {}
    for name, value in hf_tensors().items():
        part = name.split(".")[-2]
        shape = shapes.get(part, (*value.shape[:-1], HIDDEN))
        tensors[name] = rng.standard_normal(shape).astype(np.float32)
    return tensors


def write(path: Path, tiny_model: Path, case: str) -> Path:
    settings, pack_as, how = CASES[case]
    folder = make_folder(path, tiny_model, settings, pack_as, random_tensors(), **how)
    return folder.write(**SIZES)


def test_products_of_parts():
    for name, found in on_virtual_devices("run_divided.py", 3).items():
        # The order of sums, and of LLM.int8 what it multiplies as floats.
        assert found["error"] < 1e-5, name
        assert found.get("rows", True), name
        assert found["share"] == (1 if "whole" in name.split(", ")[-1] else 1 / 3), name
        # The greatest of a row, or the least too, where nothing else says by what it is rounded.
        of_rows = {"int8 by int8": 1, "int8, zero points": 2, "LLM.int8": 1}
        format, _, by = name.rpartition(", ")
        expected = 1 + of_rows.get(format, 0) if by == "by inputs" else 0
        assert found["all_reduces"] <= expected, name


def test_greedy_tokens_are_those_of_one_device(tmp_path, tiny_model):
    model = write(tmp_path / "model", tiny_model, "AWQ")
    sizes = [1, 2, 3, 4]
    one, *more = spread(model, sizes, kept=True, num_gpu_blocks_override=26)
    for size, found in zip(sizes[1:], more, strict=True):
        assert_same(one, found)
        divided = 264 % size == 0
        assert (found["all_reduces"], found["all_gathers"]) == (4 + divided, 0)


def test_stages_keep_the_codes_of_their_layers(tmp_path, tiny_model):
    model = write(tmp_path / "model", tiny_model, "act-order")
    one, two = in_stages(model, [(1, 1), (2, 2)], kept=True)
    assert_same_in_stages(one, two)
    assert two["weights"] == [[0, 1], [2, 3]]


def test_every_device_has_its_part_of_the_codes(tmp_path, tiny_model):
    sizes = [1, 2, 8]
    folders = [write(tmp_path / f"model-{i}", tiny_model, case) for i, case in enumerate(CASES)]
    models = [(str(folder), None) for folder in folders]
    answers = on_virtual_devices("run_quantised.py", models, sizes)
    for case, (one, two, *more) in zip(CASES, answers, strict=True):
        # A copy on the devices behind.
        assert two["elsewhere"] == two["logits"] and two["devices"] == [2, 3]
        for size, found in zip(sizes[1:], (two, *more), strict=True):
            np.testing.assert_allclose(found["logits"], one["logits"], atol=1e-4)
            assert found["codes"].keys() == one["codes"].keys()
            for path, nbytes in found["codes_of_one"].items():
                assert nbytes * size == found["codes"][path], (case, path)
            # A product's inputs are gathered where its groups are of everybody's.
            assert (found["all_gathers"] > 0) == (case == "act-order"), case
            assert bool(found["said"]) == (case == "act-order"), case
    groups = [found["groups"] for found in answers[list(CASES).index("groups of heads")]]
    assert [of["layers.0.attn.o.weight"] for of in groups] == [96, 96, 32]
    assert {of["layers.0.mlp.down.weight"] for of in groups} == {96}


@pytest.mark.skipif(not native.available(), reason="the native library takes blocks apart")
def test_gguf_stays_quantised():
    """Spans of 256 inputs are cut where heads, or devices, do not have whole ones."""
    [(one, found)] = on_virtual_devices("run_quantised.py", [(str(K_QUANTS), None)], [1, 3])
    np.testing.assert_allclose(found["logits"], one["logits"], atol=1e-4)
    assert found["codes"].keys() == one["codes"].keys() and not found["said"]
    divided = [p for p, n in found["codes_of_one"].items() if n * 3 == found["codes"][p]]
    assert len(divided) == 7, divided  # of its one layer


@pytest.mark.parametrize("names", [["ct-mixed", "ct-int8-token-asym", "ct-w4a8"]])
def test_inputs_are_rounded_as_on_one_device(names, tmp_path):
    models = [(str(our_oracle(name, tmp_path)), None) for name in names]
    for one, *more in on_virtual_devices("run_quantised.py", models, [1, 8]):
        for found in more:
            worst = np.abs(np.subtract(found["logits"], one["logits"])).max(-1)
            # A value that falls between two codes may get the other one, by the order of a sum.
            assert np.median(worst) < 1e-4 and worst.max() < 0.5
            assert not found["said"]


@pytest.mark.skipif(not native.available(), reason="the native library makes the codes")
def test_floats_are_quantised_and_divided(tmp_path, tiny_model):
    """The embedding and the head too."""
    tensors = {n: np.ones_like(x) if x.ndim == 1 else x / 8 for n, x in random_tensors().items()}
    folder = write_folder(tmp_path / "model", tensors, **SIZES)
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, folder / name)
    [(one, found)] = on_virtual_devices("run_quantised.py", [(str(folder), "int4")], [1, 3])
    expected = np.asarray(one["logits"])
    # Activations are bfloat16.
    error = np.linalg.norm(found["logits"] - expected) / np.linalg.norm(expected)
    assert error < 0.02
    assert {"embed.weight", "head.weight", "layers.1.mlp.down.weight"} < found["codes"].keys()
    for path, nbytes in found["codes_of_one"].items():
        assert nbytes * 3 == found["codes"][path], path
    assert found["all_gathers"] == 0 and not found["said"]
