"""GGUF's quantised blocks: llama.cpp's bytes, which read back near what they were made of."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from llmjax_kernels.gguf_quantise import BLOCKS, quantise_gguf

ANSWERS = np.load(Path(__file__).parent / "fixtures" / "gguf_blocks.npz")


@pytest.mark.every_isa
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_are_those_of_llama_cpp(name, weighted):
    rows, importance = ANSWERS["rows"], ANSWERS["importance"]
    found = quantise_gguf(name, rows, rows.shape[1], importance if weighted else None)
    np.testing.assert_array_equal(found, ANSWERS[f"{name}.importance" if weighted else name])


@pytest.mark.parametrize("name", BLOCKS)
def test_many_rows_are_what_each_is_alone(name):
    # More than a thread takes at once, and blocks that straddle what is done together.
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((700, 768)) * 0.1).astype(np.float32)
    found = quantise_gguf(name, rows, 768)
    for start in (0, 341, 699):
        np.testing.assert_array_equal(
            found[start : start + 1], quantise_gguf(name, rows[start : start + 1], 768)
        )
    values = quants.dequantize(found, GGMLQuantizationType[name])
    bits = int(name.lstrip("IQ")[0])
    assert np.sqrt(np.mean((values - rows) ** 2)) < 0.25 / 2**bits


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_taken_as_they_are(dtype):
    rows = ANSWERS["rows"][11:].astype(dtype)
    wide = quantise_gguf("Q4_K", rows.astype(np.float32), 512)
    np.testing.assert_array_equal(quantise_gguf("Q4_K", rows, 512), wide)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_rows(name):
    nbytes = 256 // BLOCKS[name][0] * BLOCKS[name][1]
    assert quantise_gguf(name, np.empty((0, 256), np.float32), 256).shape == (0, nbytes)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value):
    rows = np.ones((33, 256), np.float32)
    rows[20, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantise_gguf("Q4_K", rows, 256)


def test_scales_beyond_half_floats_are_refused():
    rows = np.linspace(-1e9, 1e9, 256, dtype=np.float32)[None]
    with pytest.raises(ValueError, match="too large for Q6_K"):
        quantise_gguf("Q6_K", rows, 256)


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="rows of 288 are no whole blocks of 256"):
        quantise_gguf("Q4_K", np.ones((1, 288), np.float32), 288)


@pytest.mark.parametrize(
    ("importance", "why"),
    [
        (np.ones(255), "256 inputs, and importance is of 255"),
        (np.full(256, -1.0), "negative or not finite"),
        (np.full(256, np.nan), "negative or not finite"),
    ],
)
def test_importance_that_makes_no_sense_is_refused(importance, why):
    with pytest.raises(ValueError, match=why):
        quantise_gguf("Q4_K", np.ones((1, 256), np.float32), 256, importance)
