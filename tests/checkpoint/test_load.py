"""Loading into a decoder: what fits, what does not, what comes out."""

from __future__ import annotations

import json
import logging
import shutil

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGMLQuantizationType
from tiny_files import (
    HIDDEN,
    LAYERS,
    TINY_TOKENIZER,
    VOCAB,
    finish,
    gguf_tensors,
    hf_tensors,
    new_writer,
    parameters,
    write_folder,
    write_gguf,
)

from llmjax.checkpoint import load_model
from llmjax.checkpoint.base import Checkpoint
from llmjax.errors import (
    CheckpointFormatError,
    ConfigError,
    UnsupportedModelError,
    WeightMismatchError,
)
from llmjax.models import Decoder


@pytest.fixture
def folder(tmp_path, tiny_model):
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, tmp_path / name)
    return tmp_path


def load(path, dtype="float32"):
    return load_model(path, dtype=dtype, progress=False)


def arrays(model) -> dict[str, jax.Array]:
    return {".".join(map(str, keys)): leaf[...] for keys, leaf in nnx.to_flat_state(model.state)}


def assert_parameters(model, expected: dict[str, np.ndarray]) -> None:
    found = arrays(model)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails where weights are read: what is refused must be refused before."""

    def refuse(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "read_into", refuse)


def test_a_folder_and_a_gguf_file_give_the_same_parameters(folder):
    assert_parameters(load(write_folder(folder, shards=2)), parameters())
    assert_parameters(load(write_gguf(folder / "m.gguf")), parameters())


def test_the_decoder_runs(folder):
    model = load(write_folder(folder))
    decoder = nnx.merge(model.graphdef, model.state)
    assert isinstance(decoder, Decoder)
    logits = decoder(jnp.array(model.tokenizer.encode("abc"))).logits
    assert logits.shape[-1] == VOCAB
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_rounded_once_and_norms_stay_float32(folder, stored, dtype):
    tensors = {n: v.astype(stored) for n, v in hf_tensors().items()}
    model = load(write_folder(folder, tensors), dtype)
    assert model.dtype == jnp.dtype(dtype)
    expected = {
        path: v.astype(np.float32 if "norm" in path else jnp.dtype(dtype))
        for path, v in parameters(tensors).items()
    }
    assert_parameters(model, expected)
    assert {a.dtype for p, a in arrays(model).items() if "norm" in p} == {jnp.dtype("float32")}


def test_quantised_weights(tmp_path):
    writer = new_writer(tmp_path / "m.gguf")
    expected = {}
    for (name, value), path in zip(gguf_tensors().items(), parameters(), strict=True):
        kind = GGMLQuantizationType.Q8_0 if value.ndim == 2 else GGMLQuantizationType.F32
        data = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        expected[path] = gguf.quants.dequantize(data, kind)
    finish(writer)
    found = arrays(load(tmp_path / "m.gguf"))
    for path, value in expected.items():
        if "attn.q." not in path and "attn.k." not in path:
            np.testing.assert_array_equal(found[path], value, err_msg=path)
    np.testing.assert_allclose(
        found["layers.0.attn.q.weight"], parameters()["layers.0.attn.q.weight"], atol=0.03
    )


def test_auto_is_float32_on_a_cpu(folder):
    tensors = {n: v.astype(ml_dtypes.bfloat16) for n, v in hf_tensors().items()}
    assert load(write_folder(folder, tensors), "auto").dtype == jnp.float32
    with pytest.raises(ConfigError, match="allowed: auto, float32"):
        load(folder, "int8")


@pytest.mark.usefixtures("nothing_is_read")
def test_every_missing_extra_and_misshapen_tensor_is_listed(folder):
    tensors = hf_tensors()
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.zeros((HIDDEN, 8), np.float32)
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    with pytest.raises(WeightMismatchError) as caught:
        load(write_folder(folder, tensors))
    error = caught.value
    assert error.missing == ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    assert error.extra == ["model.layers.7.mlp.up_proj.weight"]
    [shape] = error.misshapen
    assert shape == (
        "model.layers.0.self_attn.o_proj.weight [64, 8], "
        "expected to fill layers.0.attn.o.weight [64, 64]"
    )
    assert all(name in str(error) for name in (*error.missing, *error.extra, shape))


@pytest.mark.usefixtures("nothing_is_read")
def test_a_tensor_that_cannot_be_permuted_is_misshapen(tmp_path):
    tensors = gguf_tensors()
    tensors["blk.0.attn_q.weight"] = np.zeros((60, HIDDEN), np.float32)
    with pytest.raises(WeightMismatchError, match=r"blk.0.attn_q.weight \[60, 64\]"):
        load(write_gguf(tmp_path / "m.gguf", tensors))


@pytest.mark.usefixtures("nothing_is_read")
def test_a_needed_tensor_of_another_type_is_named(folder):
    tensors = hf_tensors()
    tensors["model.norm.weight"] = np.zeros(HIDDEN, np.int64)
    with pytest.raises(UnsupportedModelError, match=r"model.norm.weight \(I64\)"):
        load(write_folder(folder, tensors))


@pytest.mark.usefixtures("nothing_is_read")
def test_an_unknown_architecture_is_named_beside_the_known(folder):
    with pytest.raises(UnsupportedModelError, match=r"'XLM'.*implemented are .*LlamaForCausalLM"):
        load(write_folder(folder, architectures=["XLM"]))
    with pytest.raises(UnsupportedModelError, match=r"config.json names no architecture; expected"):
        load(write_folder(folder, architectures=None))
    writer = gguf.GGUFWriter(folder / "m.gguf", "starcoder")
    writer.add_tensor("t", np.zeros(8, np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=r"'starcoder'.*implemented are .*gemma2"):
        load(folder / "m.gguf")


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"architectures": [', r"config.json is not a JSON object \(Expecting value: line 1 col"),
        ('["LlamaForCausalLM"]', "config.json is not a JSON object: it looks like a JSON document"),
        ("", "config.json is not a JSON object .*an empty file"),
        ("{}", "config.json names no architecture; expected .*LlamaForCausalLM"),
        ('{"model_type": "mamba"}', "no architecture, only model_type 'mamba'; .*LlamaForCausalLM"),
        ('{"architectures": "LlamaForCausalLM"}', "names no architecture"),
        ('{"architectures": [5]}', "architecture 5 is not implemented"),
        ('{"architectures": ["Mamba"]}', "config.json: architecture 'Mamba' .*LlamaForCausalLM"),
    ],
)
def test_a_broken_folder_says_which_file_and_what_is_expected(folder, config, message, has_weights):
    write_folder(folder)
    (folder / "config.json").write_text(config)
    if not has_weights:
        (folder / "model.safetensors").unlink()
    with pytest.raises((CheckpointFormatError, UnsupportedModelError), match=message):
        load(folder)


@pytest.mark.usefixtures("nothing_is_read")
def test_a_folder_without_weights_says_what_it_holds(folder):
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointFormatError, match=r"no model: .*, but no weights; expected a .gg"
    ):
        load(folder)
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(
        CheckpointFormatError, match=r"it is empty; expected a .gguf file, a folder"
    ):
        load(folder)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "64"),
        ("num_hidden_layers", "2"),
        ("num_attention_heads", 0),
        ("rms_norm_eps", "small"),
        ("max_position_embeddings", [64]),
        ("vocab_size", 1.5),
        ("vocab_size", -1),
        ("hidden_size", -1),
        ("num_hidden_layers", 1_000_000),
        ("num_attention_heads", -1),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 16),
        ("num_key_value_heads", -1),
        ("intermediate_size", -1),
        ("head_dim", 25),
        ("max_position_embeddings", -1),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "abc"),
        ("rope_theta", -1),
        ("rope_theta", float("nan")),
        ("partial_rotary_factor", 3),
        ("partial_rotary_factor", -1),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "linear", "factor": -2}),
        ("rope_scaling", {"type": "yarn", "factor": 1e300}),
        ("rope_scaling", {"type": "dynamic", "factor": float("inf")}),
        (
            "rope_scaling",
            {"type": "longrope", "short_factor": ["a"] * 4, "long_factor": [1.0] * 4},
        ),
    ],
)
def test_a_setting_that_makes_no_model_is_refused(folder, name, value):
    changes = {"head_dim": None, name: value}
    with pytest.raises(CheckpointFormatError, match="value that makes no model"):
        load(write_folder(folder, **changes))


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("count", [0, 2**31 - 1, 2**32 - 1])
def test_a_gguf_file_of_too_many_layers_is_refused(tmp_path, count):
    writer = new_writer(tmp_path / "m.gguf")
    writer.kv_data[0]["llama.block_count"].value = count
    finish(writer)
    with pytest.raises(CheckpointFormatError, match=f"num_layers is {count}, allowed: 1 to 4096"):
        load(tmp_path / "m.gguf")


@pytest.mark.usefixtures("nothing_is_read")
def test_a_missing_setting_is_named(folder):
    write_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="hidden_size"):
        load(folder)


def test_known_extras_are_skipped_in_one_line(folder, caplog):
    tensors = hf_tensors()
    for i in range(LAYERS):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["vision_tower.encoder.weight"] = np.zeros(4, np.int64)
    tensors["mtp.0.proj.weight"] = np.zeros(4, np.float32)
    with caplog.at_level(logging.INFO, "llmjax.checkpoint"):
        assert_parameters(load(write_folder(folder, tensors)), parameters())
    [line] = [r.getMessage() for r in caplog.records if "skipping" in r.getMessage()]
    assert line.startswith("skipping 4 tensors: ")


def test_rope_factors_of_a_gguf_file_reach_the_configuration(tmp_path):
    factors = np.array([1, 1, 2, 8], np.float32)
    tensors = gguf_tensors() | {"rope_freqs.weight": factors}
    model = load(write_gguf(tmp_path / "m.gguf", tensors))
    assert {rope.freq_factors for rope in model.config.ropes} == {(1, 1, 2, 8)}


def test_a_tied_model_ignores_a_head(folder, caplog):
    tensors = hf_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    expected = parameters(tensors)
    del expected["head.weight"]
    assert_parameters(load(write_folder(folder, tensors, tie_word_embeddings=True)), expected)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    assert_parameters(load(write_folder(folder, tensors, tie_word_embeddings=True)), expected)
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith("lm_head.weight differs from model.embed_tokens.weight")


def test_an_untied_model_needs_its_head(folder):
    tensors = hf_tensors()
    del tensors["lm_head.weight"]
    with pytest.raises(WeightMismatchError) as caught:
        load(write_folder(folder, tensors))
    assert caught.value.missing == ["lm_head.weight"]


def test_a_gguf_file_without_output_is_tied(tmp_path):
    tensors = gguf_tensors()
    del tensors["output.weight"]
    model = load(write_gguf(tmp_path / "m.gguf", tensors))
    assert model.config.tie_embeddings
    assert "head.weight" not in arrays(model)


def test_end_of_sequence_ids_are_the_union_and_defaults_are_kept(folder):
    write_folder(folder, eos_token_id=[5, 6])
    generation = {"eos_token_id": 7, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = load(folder)
    assert model.tokenizer.eos_token_ids == {2, 5, 6, 7}
    assert model.generation_defaults == {"temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").unlink()
    write_folder(folder, eos_token_id=None)
    assert load(folder).tokenizer.eos_token_ids == {2}


def test_sampling_defaults_of_a_gguf_file(tmp_path):
    writer = new_writer(tmp_path / "m.gguf")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    for name, value in gguf_tensors().items():
        writer.add_tensor(name, value)
    finish(writer)
    model = load(tmp_path / "m.gguf")
    assert model.generation_defaults == {"temperature": 0.5, "top_k": 20}
    assert model.tokenizer.eos_token_ids == {2}
