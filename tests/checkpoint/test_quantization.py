"""Float checkpoints that are quantised while they are loaded."""

from __future__ import annotations

import logging
import shutil

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGMLQuantizationType
from tiny_files import (
    TINY_TOKENIZER,
    finish,
    gguf_tensors,
    hf_tensors,
    new_writer,
    parameters,
    write_folder,
    write_gguf,
)

from llmjax import LLM, SamplingParams
from llmjax.checkpoint import convert, load_model
from llmjax.checkpoint.data_file import FileCheckpoint
from llmjax.checkpoint.serving_kernels import runs_native
from llmjax.errors import ConfigError
from llmjax_kernels import native
from llmjax_kernels.packed import PackedWeight, quantise
from llmjax_kernels.weight_format import QUANTISATIONS

WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
"""The tiny files' tensors as heads that the native kernels take."""
PROMPT = "the quick brown fox"
SIZES = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 8,
    "token_buckets": (64,),
    "seq_buckets": (2,),
    "background": False,
}
MATRICES = 2 * 7 + 2
needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")
by_quantization = pytest.mark.parametrize("quantization", QUANTISATIONS)


@pytest.fixture
def folder(tmp_path, tiny_model):
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def nothing_is_read(monkeypatch):
    def refuse(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(FileCheckpoint, "read_rows", refuse)


def load(path, quantization, **options):
    options = {"page_size": 16, "progress": False, **options}
    return load_model(path, quantization=quantization, **options)


def leaves(model) -> dict[str, jax.Array | PackedWeight]:
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(model.state)}


def assert_quantised(model, quantization, expected, head="head.weight"):
    found = leaves(model)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if value.ndim == 2:
            kind = "int8" if path == head else quantization
            assert found[path].format == QUANTISATIONS[kind], path
            alone = quantise(value, kind).unpack()
            np.testing.assert_array_equal(found[path].unpack(), alone, err_msg=path)
        else:
            np.testing.assert_array_equal(found[path], value.astype(np.float32), err_msg=path)


@needs_native
@by_quantization
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_matrix_of_a_folder(folder, stored, quantization):
    tensors = {name: value.astype(stored) for name, value in hf_tensors().items()}
    model = load(write_folder(folder, tensors, **WIDE), quantization)
    assert_quantised(model, quantization, parameters(tensors))
    assert model.weight_type == f"quantised to {quantization}"


@needs_native
@by_quantization
def test_a_tied_embedding_is_the_head(folder, quantization):
    tensors = hf_tensors()
    del tensors["lm_head.weight"]
    model = load(write_folder(folder, tensors, tie_word_embeddings=True, **WIDE), quantization)
    assert_quantised(model, quantization, parameters(tensors), head="embed.weight")


@needs_native
@by_quantization
def test_orbax_and_gguf(folder, quantization):
    converted = convert(write_folder(folder, **WIDE), folder / "orbax", progress=False)
    assert_quantised(load(converted, quantization), quantization, parameters())
    model = load(write_gguf(folder / "m.gguf", heads=4), quantization)
    # The file's heads are of 8, these of 16: q and k come in another order of rows.
    expected = {k: v for k, v in leaves(model).items() if "attn.q." in k or "attn.k." in k}
    assert {v.format for v in expected.values()} == {QUANTISATIONS[quantization]}


@needs_native
def test_float_tensors_of_a_gguf_file(tmp_path):
    kinds = {"attn_v": "F16", "attn_output": "BF16", "ffn_up": "F32"}
    writer = new_writer(tmp_path / "m.gguf", heads=4)
    for name, value in gguf_tensors().items():
        kind = next((k for part, k in kinds.items() if part in name), "F32")
        data = gguf.quants.quantize(value, GGMLQuantizationType[kind])
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    found, expected = leaves(load(tmp_path / "m.gguf", "int8")), parameters()
    numpy_types = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    for path, kind in [("attn.v", "F16"), ("attn.o", "BF16"), ("mlp.up", "F32")]:
        name = f"layers.1.{path}.weight"
        alone = quantise(expected[name].astype(numpy_types[kind]), "int8")
        np.testing.assert_array_equal(found[name].unpack(), alone.unpack())


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model):
    """The same bfloat16 folder, as it is and quantised."""
    folder = tmp_path_factory.mktemp("served")
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, folder / name)
    tensors = {n: v / 8 if v.ndim == 2 else np.ones_like(v) for n, v in hf_tensors().items()}
    write_folder(folder, {n: v.astype(ml_dtypes.bfloat16) for n, v in tensors.items()}, **WIDE)
    llms = {q: LLM(str(folder), quantization=q, **SIZES) for q in (None, *QUANTISATIONS)}
    yield llms
    for llm in llms.values():
        llm.close()


@needs_native
@by_quantization
def test_logits_are_near_those_of_the_floats(served, quantization):
    """Every matrix adds its relative error, independently; later layers may magnify it."""
    ids = served[None].tokenizer.encode(PROMPT)
    exact, found = (np.asarray(served[q].forward(ids).logits) for q in (None, quantization))
    # By a step: the greatest of 32 normal values / 127, or their range / 15, of which an error
    # is uniformly up to a half.
    error = {"int8": 2.1 / 127, "int4": 4.2 / 15}[quantization] / np.sqrt(12)
    relative = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert relative < 1.5 * np.sqrt(MATRICES) * error


@needs_native
@by_quantization
def test_is_served_by_the_native_kernels(served, quantization):
    """What they say is what the dequantised weights say, but for 8-bit activations."""
    llm = served[quantization]
    assert f"quantised to {quantization}" in llm.engine.describe()
    assert llm.engine.model.weight_bytes < served[None].engine.model.weight_bytes * 0.7
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    [output] = llm.generate(PROMPT, params)
    assert len(output.outputs[0].token_ids) == 8
    ids = output.prompt_token_ids
    logits = np.asarray(llm.forward(ids).logits, np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    found = [row[token].logprob for token, row in rows]
    expected = [logprobs[i, token] for i, token in enumerate(ids[1:])]
    # As the weights of int8.
    error = 2.1 / 127 / np.sqrt(12) * np.sqrt(MATRICES) * logits.std()
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * error)


@pytest.mark.usefixtures("nothing_is_read")
class TestRefused:
    @by_quantization
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_beside_a_dtype(self, folder, quantization, dtype):
        with pytest.raises(ConfigError, match=f"quantization .{quantization}.*dtype .{dtype}"):
            LLM(str(folder), quantization=quantization, dtype=dtype)
        with pytest.raises(ConfigError, match="quantization"):
            load(folder, quantization, dtype=dtype)

    def test_what_is_unknown(self, folder):
        with pytest.raises(ConfigError, match="quantization is 'nf4', allowed: int8, int4, fp8"):
            LLM(str(folder), quantization="nf4")

    @by_quantization
    def test_where_xla_serves(self, folder, quantization, monkeypatch):
        write_folder(folder, **WIDE)
        said = f"quantization is '{quantization}': only the native CPU kernels"
        with pytest.raises(ConfigError, match=said):
            load(folder, quantization, page_size=None)
        monkeypatch.setenv("LLMJAX_KERNELS", "xla")
        with pytest.raises(ConfigError, match=said):
            LLM(str(folder), quantization=quantization, **SIZES)

    def test_on_other_devices(self, folder, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        with pytest.raises(ConfigError, match="quantization is 'int8': only the native CPU"):
            load(write_folder(folder, **WIDE), "int8")

    @needs_native
    @by_quantization
    def test_what_is_quantised_already(self, tmp_path, quantization):
        writer = new_writer(tmp_path / "m.gguf", heads=4)
        for name, value in gguf_tensors().items():
            kind = GGMLQuantizationType["Q8_0" if "ffn_down" in name else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        finish(writer)
        said = rf"quantization is '{quantization}', but .*m.gguf is quantised already .*ffn_down"
        with pytest.raises(ConfigError, match=said):
            load(tmp_path / "m.gguf", quantization)

    @needs_native
    def test_rows_that_are_no_whole_groups(self, tiny_model):
        said = r"quantization is 'int4'.*groups of 32.*\[64, 48\].* and \d+ more"
        with pytest.raises(ConfigError, match=said):
            load(tiny_model, "int4")


@needs_native
def test_what_is_not_finite_is_named(folder):
    tensors = hf_tensors()
    tensors["lm_head.weight"][3, 3] = np.nan
    with pytest.raises(ConfigError, match=r"quantization: lm_head.weight .* not finite"):
        load(write_folder(folder, tensors, **WIDE), "int8")


@pytest.mark.parametrize("name", ["LLMJAX_KERNELS", "LLMJAX_ISA"])
def test_environment_that_means_nothing_is_a_config_error(monkeypatch, name):
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(ConfigError, match=f"{name} is 'nonsense', allowed: "):
        runs_native(None)


@needs_native
class TestWhatNativeKernelsLack:
    """The tiny files' heads of 8 channels have none."""

    LACK = "head_dim is 8, and they take multiples of 16 up to 512"

    def test_xla_serves_and_the_log_says_why(self, folder, monkeypatch, caplog):
        monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
        with caplog.at_level(logging.WARNING):
            assert not load(write_folder(folder), None).native
        assert self.LACK in caplog.text

    def test_insisting_is_refused(self, folder, monkeypatch):
        monkeypatch.setenv("LLMJAX_KERNELS", "native")
        with pytest.raises(ConfigError, match=f"LLMJAX_KERNELS is native, but {self.LACK}"):
            load(write_folder(folder), None)
        with pytest.raises(ConfigError, match="is native, but dtype is float16"):
            load(write_folder(folder, **WIDE), None, dtype="float16")

    def test_quantising_is_refused_with_the_reason(self, folder, monkeypatch):
        monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
        with pytest.raises(ConfigError, match=f"quantization is 'int8'.*: {self.LACK}"):
            load(write_folder(folder), "int8")
