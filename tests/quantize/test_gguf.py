"""Whole GGUF files: what they hold, who reads them, and what cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf_cases import ASKED, FIXTURES, IDS, K_QUANTS, TWINS, folder_of, sources
from jax.sharding import SingleDeviceSharding

from llmjax.checkpoint import convert, open_checkpoint
from llmjax.checkpoint.load import load_weights
from llmjax.errors import CheckpointFormatError, ConfigError, UnsupportedModelError
from llmjax.quantize import quantize
from llmjax.quantize.gguf_mix import MIXES
from llmjax.quantize.hub_config import differences
from llmjax_kernels import native

ANSWERS = np.load(Path(__file__).parent / "fixtures" / "gguf_llamacpp.npz")
K_QUANTISED = FIXTURES / "gguf" / "llama-q4_k_m.gguf"

needs_native = pytest.mark.skipif(
    not native.available(), reason="the native kernels are not built, or forbidden"
)


def write(source: Path, method: str, scratch: Path, **settings) -> Path:
    return quantize(source, scratch / "written.gguf", method, progress=False, **settings)


def logits(path: Path) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    config, table = checkpoint.read_architecture()
    device = SingleDeviceSharding(jax.devices()[0])
    float32 = jnp.dtype("float32")
    model = nnx.merge(
        *load_weights(checkpoint, config, table, float32, lambda *_: device, progress=False)
    )
    return np.asarray(model(jnp.asarray(IDS)).logits)


@pytest.mark.parametrize("name", TWINS)
def test_weights_and_settings_come_back(name, tmp_path):
    source = folder_of(name, tmp_path)
    checkpoint = open_checkpoint(write(source, "gguf:F32", tmp_path))
    config, _ = checkpoint.read_architecture()
    original, _ = open_checkpoint(source).read_architecture()
    found = differences(config, original)
    assert not [what for what in found if not what.startswith("architecture ")]
    twin = FIXTURES / "gguf" / f"{name}.gguf"
    if not twin.exists():
        return
    # Written by another's hands.
    expected = open_checkpoint(twin)
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert config == expected.read_architecture()[0]
    bfloat16 = 2.0**-8 if name == "smollm2" else 0
    for tensor in checkpoint.tensors:
        ours, theirs = (np.asarray(c.read(tensor), np.float32) for c in (checkpoint, expected))
        np.testing.assert_allclose(ours, theirs, rtol=max(1e-6, bfloat16), atol=1e-7)


@pytest.mark.parametrize("name", [*ASKED, *(pytest.param(k, marks=needs_native) for k in K_QUANTS)])
def test_llama_cpp_has_the_same_logits(name, tmp_path):
    written = write(*sources(tmp_path)[name], tmp_path)
    expected = ANSWERS[name]
    error = 1e-4
    if name.startswith("gemma"):
        error = 1e-2  # it looks GELU up in a table of half floats
    if name in K_QUANTS:
        error = 0.04 * np.abs(expected).max()  # it rounds activations to 8 bits
    np.testing.assert_allclose(logits(written), expected, atol=error, rtol=0)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_rounded_and_nothing_else(kind, tmp_path):
    checkpoint = open_checkpoint(write(FIXTURES / "gguf" / "llama3.gguf", f"gguf:{kind}", tmp_path))
    original = open_checkpoint(FIXTURES / "gguf" / "llama3.gguf")
    for name, info in checkpoint.tensors.items():
        assert info.type_name == (kind if len(info.shape) == 2 else "F32")
        values = checkpoint.read(name)
        np.testing.assert_array_equal(values, original.read(name).astype(values.dtype))


@needs_native
def test_a_gguf_file_keeps_its_metadata(tmp_path):
    written = open_checkpoint(write(K_QUANTISED, "gguf:Q5_K_M", tmp_path))
    original = open_checkpoint(K_QUANTISED)
    assert list(written.tensors) == list(original.tensors)
    for key in original.config:
        if key not in ("general.file_type", "general.quantization_version"):
            assert written.config[key] == original.config[key]
            assert written.config.types(key) == original.config.types(key)
    assert written.config["general.file_type"] == int(MIXES["Q5_K_M"].number)
    assert written.config["general.quantization_version"] == 2


@needs_native
def test_orbax_folders_give_what_their_sources_give(tmp_path):
    folder = convert(folder_of("qwen2", tmp_path), tmp_path / "of-folder", progress=False)
    converted = open_checkpoint(write(folder, "gguf:Q8_0", tmp_path))
    direct = open_checkpoint(
        quantize(folder_of("qwen2", tmp_path / "x"), tmp_path / "direct.gguf", "gguf:Q8_0")
    )
    assert converted.tensors == direct.tensors
    for name in direct.tensors:
        np.testing.assert_array_equal(converted.read(name), direct.read(name))


@needs_native
def test_orbax_folders_keep_the_metadata_of_a_gguf_source(tmp_path):
    folder = convert(K_QUANTISED, tmp_path / "of-gguf", dtype="float32", progress=False)
    converted = open_checkpoint(write(folder, "gguf:Q4_K_M", tmp_path))
    original = open_checkpoint(K_QUANTISED)
    assert set(converted.config) == set(original.config) | {
        "general.file_type",
        "general.quantization_version",
    }
    assert {n: i.type_name for n, i in converted.tensors.items()} == {
        n: i.type_name for n, i in original.tensors.items()
    }


def changed(folder: Path, **settings) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("mistral", {"sliding_window": 8}, "'llama', which has no way to say that windows is"),
        (
            "llama2",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "no way to say that ropes is",
        ),
        ("llama2", {"hidden_act": "gelu"}, "no way to say that activation is 'gelu'"),
    ],
)
def test_what_the_format_cannot_say_is_refused(name, settings, why, tmp_path):
    folder = changed(folder_of(name, tmp_path), **settings)
    with pytest.raises(UnsupportedModelError, match=why):
        write(folder, "gguf:F32", tmp_path)
    assert not list(tmp_path.glob("written*"))


def test_encoders_are_refused(tmp_path):
    config = {
        "architectures": ["BertModel"],
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 16,
    }
    folder = folder_of("llama2", tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="is an encoder"):
        write(folder, "gguf:F32", tmp_path)


@needs_native
def test_values_that_are_not_finite_are_refused(tmp_path):
    source = write(K_QUANTISED, "gguf:F32", tmp_path)
    data = bytearray(source.read_bytes())
    stored = open_checkpoint(source)._stored["blk.0.ffn_up.weight"]
    data[stored.offset : stored.offset + 4] = np.float32(np.nan).tobytes()
    source.write_bytes(data)
    for method, kind in (("gguf:Q4_K_M", "Q4_K"), ("gguf:F16", "F16")):
        with pytest.raises(CheckpointFormatError, match=f"blk.0.ffn_up.weight cannot be {kind}"):
            quantize(source, tmp_path / "bad.gguf", method, progress=False)
        assert not list(tmp_path.glob("bad*"))


def test_what_float16_cannot_hold_is_refused(tmp_path):
    source = write(K_QUANTISED, "gguf:F32", tmp_path)
    data = bytearray(source.read_bytes())
    stored = open_checkpoint(source)._stored["output.weight"]
    data[stored.offset : stored.offset + 4] = np.float32(1e6).tobytes()
    source.write_bytes(data)
    with pytest.raises(CheckpointFormatError, match=r"output.weight cannot be F16: .* not finite"):
        quantize(source, tmp_path / "bad.gguf", "gguf:F16", progress=False)


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("gguf", {}, "method is 'gguf', allowed: gguf:F32, gguf:F16"),
        ("gguf:Q4", {}, "method is 'gguf:Q4', allowed"),
        ("gguf:IQ2_XXS", {}, "method is 'gguf:IQ2_XXS', allowed"),
        ("gptq:Q4_K_M", {}, "allowed with a colon: gguf:TYPE"),
        ("gguf:Q4_K_M", {"bits": 4}, "bits is 4, which method gguf:Q4_K_M has no use for"),
        ("gguf:Q2_K_S", {}, "allowed with an imatrix or calibration alone"),
        ("gguf:Q4_K_M", {"imatrix": "a", "calibration": "b"}, "allowed: one of them"),
        ("int8", {"imatrix": "a"}, "imatrix is 'a', which method int8 has no use for"),
    ],
)
def test_settings_that_make_no_sense_are_refused(method, settings, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        write(K_QUANTISED, method, tmp_path, **settings)


def test_a_folder_that_is_no_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        quantize(K_QUANTISED, tmp_path / "file" / "x.gguf", "gguf:F32", progress=False)
