"""Converted checkpoints: the same model, from orbax's own format."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_load import arrays, assert_parameters, load
from tiny_files import (
    TINY_TOKENIZER,
    gguf_tensors,
    hf_tensors,
    parameters,
    write_folder,
    write_gguf,
)

from llmjax.checkpoint import convert, open_checkpoint
from llmjax.checkpoint.orbax_folder import OrbaxCheckpoint, write_orbax
from llmjax.errors import CheckpointFormatError, ConfigError, WeightMismatchError


@pytest.fixture
def source(tmp_path, tiny_model):
    folder = write_folder(tmp_path / "source", shards=2)
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, folder / name)
    (folder / "generation_config.json").write_text('{"top_k": 9, "eos_token_id": [8]}')
    return folder


def test_a_converted_folder_loads_like_its_source(source, tmp_path):
    converted = convert(source, tmp_path / "out", progress=False)
    ours, theirs = load(converted), load(source)
    assert isinstance(open_checkpoint(converted), OrbaxCheckpoint)
    assert_parameters(ours, parameters())
    assert ours.config == theirs.config
    assert ours.tokenizer.eos_token_ids == theirs.tokenizer.eos_token_ids == {2, 8}
    assert ours.generation_defaults == {"top_k": 9}
    assert ours.tokenizer.encode("abc") == theirs.tokenizer.encode("abc")
    assert not list(converted.glob("*.index.json"))


def test_a_converted_gguf_file_needs_no_other_file(tmp_path):
    factors = {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)}
    write_gguf(tmp_path / "m.gguf", gguf_tensors() | factors)
    converted = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    expected = load(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").unlink()
    model = load(converted)
    assert_parameters(model, parameters())
    assert model.config == expected.config
    assert model.tokenizer.encode("abc") == expected.tokenizer.encode("abc")
    assert model.tokenizer.eos_token_ids == expected.tokenizer.eos_token_ids


def test_keeps_the_stored_type_unless_told_otherwise(source, tmp_path):
    half = {name: value.astype(np.float16) for name, value in hf_tensors().items()}
    write_folder(source, half)
    kept = open_checkpoint(convert(source, tmp_path / "kept", progress=False))
    assert kept.tensors["embed.weight"].type_name == "F16"
    assert kept.tensors["norm.weight"].type_name == "F32"
    wide = convert(source, tmp_path / "wide", dtype="float32", progress=False)
    assert open_checkpoint(wide).tensors["embed.weight"].type_name == "F32"
    assert_parameters(load(wide), parameters(half))


def test_orbax_itself_restores_it(source, tmp_path):
    converted = convert(source, tmp_path / "out", progress=False)
    mesh = jax.make_mesh((1,), ("tensor",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(converted / "weights").item_metadata.tree
        args = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=sharding), tree)
        tree = checkpointer.restore(
            converted / "weights", args=ocp.args.PyTreeRestore(restore_args=args)
        )
    found = tree["layers"]["1"]["attn"]["o"]["weight"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, parameters()["layers.1.attn.o.weight"])


def test_refuses_to_overwrite_and_leaves_nothing_half_done(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert(source, out, progress=False)
    out.rmdir()

    def fail(folder, *args):
        write_orbax(folder, *args)
        raise OSError("no space left on device")

    monkeypatch.setattr("llmjax.checkpoint.orbax_folder.write_orbax", fail)
    with pytest.raises(OSError, match="no space"):
        convert(source, out, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_place_that_cannot_be_written_is_refused_before_loading(source, tmp_path, monkeypatch):
    def load(*args, **options):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("llmjax.checkpoint.conversion.load_weights", load)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"cannot write {file}/out: .*(directory|exists)"):
        convert(source, file / "out", progress=False)


def test_a_damaged_folder_is_named(source, tmp_path):
    out = convert(source, tmp_path / "out", progress=False)
    marker = json.loads((out / "llmjax.json").read_text())
    (out / "llmjax.json").write_text(json.dumps(marker | {"version": 99}))
    with pytest.raises(CheckpointFormatError, match="format 99"):
        open_checkpoint(out)
    (out / "llmjax.json").write_text(json.dumps(marker | {"decoder": {"odd": 1}}))
    with pytest.raises(CheckpointFormatError, match="another llmjax's configuration"):
        open_checkpoint(out)
    marker["decoder"]["tie_embeddings"] = True
    (out / "llmjax.json").write_text(json.dumps(marker))
    with pytest.raises(WeightMismatchError):
        load(out)
    shutil.rmtree(out / "weights")
    with pytest.raises(CheckpointFormatError, match="not a complete orbax checkpoint"):
        open_checkpoint(out)


@pytest.mark.parametrize("rows", [20011, 20480])
def test_arrays_of_more_than_a_chunk(tmp_path, tiny_model, rows):
    """One number of rows is prime: chunks of equal size do not exist."""
    tensors = hf_tensors()
    big = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = big, big[::-1].copy()
    source = write_folder(tmp_path / "source", tensors, vocab_size=rows)
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, source / name)
    found = arrays(load(convert(source, tmp_path / "out", progress=False)))
    np.testing.assert_array_equal(found["embed.weight"], big)
    np.testing.assert_array_equal(found["head.weight"], big[::-1])
