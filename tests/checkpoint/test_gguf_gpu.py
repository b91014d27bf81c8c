"""GGUF files whose matrices stay quantised for one GPU, which need not be here."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jax.sharding import Mesh, SingleDeviceSharding
from tiny_files import finish, gguf_tensors, new_writer

from llmjax.checkpoint import load_model, open_checkpoint
from llmjax.checkpoint.load import load_weights
from llmjax.errors import CheckpointFormatError
from llmjax_kernels import native, triton_call
from llmjax_kernels.gguf_quantise import quantise_gguf
from llmjax_kernels.gpu import Gpu, compiling_for
from llmjax_kernels.quant_matmul import QuantFormat, QuantWeight, jax_triton

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # interpreter.py

K_QUANTS = Path(__file__).parents[1] / "models" / "fixtures" / "gguf" / "llama-q4_k_m.gguf"
Q4_K = QuantFormat("int4", 32, minima=True, span=256)
Q6_K = QuantFormat("int8", 16, span=256)
BY_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
H100 = Gpu(90, 132)
IDS = jnp.arange(3, 20, dtype=jnp.int32)

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(triton_call, "installed", lambda: True)
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)


@pytest.fixture
def file(tmp_path):
    """A tiny model with the types that have blocks of 32, and MXFP4, which no kernel reads."""
    writer, kinds = new_writer(tmp_path / "m.gguf"), {}
    for i, (name, value) in enumerate(gguf_tensors().items()):
        if value.ndim == 1:
            writer.add_tensor(name, np.ones_like(value))
            continue
        kinds[name] = ("MXFP4", *BY_32)[i % 7]
        kind = GGMLQuantizationType[kinds[name]]
        if kinds[name] == "MXFP4":
            rows = gguf.quants.quantize(value / 8, kind)
        else:
            rows = quantise_gguf(kinds[name], value / 8, value.shape[1])
        writer.add_tensor(name, rows, raw_dtype=kind)
    finish(writer)
    assert set(kinds.values()) == {"MXFP4", *BY_32}
    return tmp_path / "m.gguf"


def load(path, **options):
    with compiling_for(H100):
        return load_model(path, progress=False, **options)


def weights_of(path, **options):
    """Of a file without a tokenizer."""
    checkpoint, device = open_checkpoint(path), SingleDeviceSharding(jax.devices()[0])
    architecture = checkpoint.read_architecture()
    float32 = jnp.dtype("float32")
    return load_weights(
        checkpoint, *architecture, float32, lambda *_: device, progress=False, **options
    )


def leaves(model):
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(model.state)}


def is_kept(model):
    return {path for path, leaf in leaves(model).items() if isinstance(leaf, QuantWeight)}


def logits(model):
    compute = jax.jit(lambda state: nnx.merge(model.graphdef, state)(IDS).logits)
    return np.asarray(compute(model.state))


def assert_values(model, expanded):
    expected = leaves(expanded)
    dequantise = jax.jit(QuantWeight.dequantise)
    for path, leaf in leaves(model).items():
        found = dequantise(leaf) if isinstance(leaf, QuantWeight) else leaf
        np.testing.assert_array_equal(found, expected[path], err_msg=path)


def test_a_model_of_k_quants_computes_what_its_values_say(monkeypatch):
    """By Triton's kernels, in its interpreter."""
    model, expanded = (weights_of(K_QUANTS, keep_codes=keep) for keep in (True, False))
    assert not is_kept(expanded)
    weights = {path: leaves(model)[path].format for path in is_kept(model)}
    assert set(weights.values()) == {Q4_K, Q6_K}
    assert len(weights) == sum(leaf.ndim == 2 for leaf in leaves(expanded).values())
    assert_values(model, expanded)

    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton, whose interpreter runs the kernels, is not installed")
    import interpreter

    launched = []

    def launch(kernel, *args, **options):
        launched.append(kernel)
        return interpreter.launch(kernel, *args, **options)

    monkeypatch.setattr(jax_triton, "launch", launch)
    with compiling_for(H100), jax.disable_jit():
        found = np.asarray(nnx.merge(model.graphdef, model.state)(IDS).logits)
    assert len(launched) == len(weights) - 1  # of the embedding rows are read
    expected = logits(expanded)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_types_that_no_kernel_reads_become_floats_and_are_named(file, caplog):
    with caplog.at_level(logging.WARNING):
        model, expanded = load(file), load(file, dtype="float32")
    said = [r.getMessage() for r in caplog.records if "become floats" in r.getMessage()]
    assert said == [f"{file}: matrices in MXFP4 become floats: no kernel for GPUs reads them"]
    assert 0 < len(is_kept(model)) < sum(leaf.ndim == 2 for leaf in leaves(expanded).values())
    assert model.weight_type == "as stored"
    assert_values(model, expanded)
    found, expected = logits(model), logits(expanded)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_over_a_mesh_they_are_kept_too(file):
    """tests/parallel has one of several devices."""
    one, meshed = load(file), load(file, mesh=Mesh(jax.devices()[:1], ("tensor",)))
    assert is_kept(meshed) == is_kept(one)
    found, expected = logits(meshed), logits(one)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_without_the_native_library_they_become_floats(file, monkeypatch, caplog):
    monkeypatch.setattr(native, "_LIBRARY", native._LIBRARY.with_name("missing.so"))
    native.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            model = load(file)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert not is_kept(model)
    assert model.weight_type == model.dtype.name
    [said] = [r.getMessage() for r in caplog.records if "become floats" in r.getMessage()]
    assert "IQ4_NL, MXFP4, Q4_0" in said and "native library cannot be loaded" in said


def test_a_scale_that_is_not_finite_is_refused(tmp_path):
    writer = new_writer(tmp_path / "m.gguf")
    for name, value in gguf_tensors().items():
        rows = value
        if name == "blk.1.ffn_down.weight":
            nbytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0][1]
            rows = quantise_gguf("Q8_0", value, value.shape[1])
            rows[3, nbytes : nbytes + 2] = np.array([np.nan], np.float16).view(np.uint8)
        kind = GGMLQuantizationType.F32 if rows is value else GGMLQuantizationType.Q8_0
        writer.add_tensor(name, rows, raw_dtype=kind)
    finish(writer)
    with pytest.raises(CheckpointFormatError, match=r"blk.1.ffn_down.weight is damaged: .*finite"):
        load(tmp_path / "m.gguf")
