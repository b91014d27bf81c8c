"""bitsandbytes checkpoints: 4 bits, with scales in 8 bits too, and LLM.int8."""

from __future__ import annotations

import json

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
from llmjax.quant.base import TABLES

STATE = "weight.quant_state.bitsandbytes__"


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-fp4"])
def test_4_bits_of_a_peer_that_computes_in_bfloat16(name):
    check_answers(oracle(name), 0.07)


def test_scales_in_8_bits_and_blocks_that_go_on_from_row_to_row(tmp_path):
    check_answers(our_oracle("bnb-nf4-nested", tmp_path), 1e-4)


def test_int8_token_by_token(tmp_path):
    check_answers(our_oracle("bnb-int8", tmp_path), 1e-4, flips=0.1)


def test_int8_of_prompts_at_once():
    """There the peer keeps a column in floats for all tokens where one has an outlier."""
    check_answers(oracle("bnb-int8"), 0.06)


def four_bits(kind, shape, block, store=np.uint8):
    rng, (N, K) = np.random.default_rng(0), shape
    codes = rng.integers(0, 16, N * K, np.uint8)
    octets = codes[::2] << 4 | codes[1::2]
    absmax = rng.random(-(-N * K // block), np.float32)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [N, K]}
    tensors = {
        "x.weight": octets.view(store)[:, None],
        "x.weight.absmax": absmax,
        "x.weight.quant_map": TABLES[kind],
        f"x.{STATE}{kind}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    values = TABLES[kind][codes] * np.repeat(absmax, block)[: N * K]
    return tensors, values.reshape(shape)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(4, 64), (6, 96), (5, 20), (2, 7)])
@pytest.mark.parametrize("store", [np.uint8, ml_dtypes.bfloat16, np.float32])
def test_any_shape_in_any_storage(kind, shape, store):
    if shape[0] * shape[1] // 2 % np.dtype(store).itemsize:
        pytest.skip("codes that do not fill whole elements of this type")
    tensors, expected = four_bits(kind, shape, 64, store)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    [matrix] = read_matrices(settings, in_memory(tensors)).values()
    found = [matrix.dequantise(i, i + 1) for i in range(shape[0])]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)
    np.testing.assert_allclose(matrix.dequantise(0, shape[0]), expected, rtol=1e-6)


def state(**changes):
    def change(stored):
        text = json.dumps(json.loads(stored.tobytes()) | changes)
        return np.frombuffer(text.encode(), np.uint8)

    return put(f"{STATE}nf4", change)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("bnb-nf4", drop("weight.absmax"), f"layer {LAYER} has no weight.absmax"),
        ("bnb-nf4", drop("weight.quant_map"), f"layer {LAYER} has no weight.quant_map"),
        ("bnb-nf4", drop(f"{STATE}nf4"), f"layer {LAYER} has no {STATE}"),
        ("bnb-nf4", drop("weight"), f"layer {LAYER} has no weight, "),
        ("bnb-nf4", put("weight", lambda w: w[1:]), f"layer {LAYER}: weight has 4095 bytes"),
        ("bnb-nf4", put("weight.absmax", lambda a: a[1:]), f"layer {LAYER}: weight.absmax is F32"),
        ("bnb-nf4", put("weight.quant_map", lambda m: m + 1), "quant_map is not that of nf4"),
        ("bnb-nf4", put(f"{STATE}nf4", lambda s: s[1:]), f"layer {LAYER}: its quant_state is"),
        ("bnb-nf4", state(blocksize=0), f"layer {LAYER}: its quant_state is damaged"),
        ("bnb-nf4", state(blocksize=48), f"layer {LAYER}: weight.absmax is F32 .128., expected"),
        ("bnb-nf4", state(shape=[64]), f"layer {LAYER}: its quant_state is damaged"),
        ("bnb-nf4", state(nested_blocksize=256), f"layer {LAYER}: its quant_state is damaged"),
        ("bnb-int8", drop("SCB"), f"layer {LAYER} has no SCB"),
        ("bnb-int8", put("SCB", lambda s: s[1:]), f"layer {LAYER}: SCB is F32"),
    ],
)
def test_a_bad_file_is_told_by_its_layer(name, edit, message, tmp_path):
    with pytest.raises(CheckpointFormatError, match=message):
        opened(edited(oracle(name), tmp_path, edit))


def test_what_is_not_implemented_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"weight_format of layer .*down_proj is 1"):
        opened(edited(oracle("bnb-int8"), tmp_path, other_format))
    folder = edited(oracle("bnb-nf4"), tmp_path, lambda t, s: s.update(load_in_4bit=False))
    with pytest.raises(UnsupportedModelError, match="load_in_4bit and load_in_8bit is"):
        opened(folder)


def other_format(tensors, settings):
    tensors["model.layers.0.mlp.down_proj.weight_format"] = np.array(1, np.uint8)
