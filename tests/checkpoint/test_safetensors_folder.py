"""safetensors folders, whole and broken."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_files import hf_tensors, write_folder

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.base import Part
from llmjax.checkpoint.data_file import DataFile
from llmjax.errors import CheckpointFormatError, UnsupportedModelError

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_was_saved(tmp_path, shards):
    checkpoint = open_checkpoint(write_folder(tmp_path, shards=shards))
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.tensors.keys() == hf_tensors().keys()
    for name, value in hf_tensors().items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_keeps_the_stored_type(tmp_path, dtype):
    value = np.linspace(-2, 2, 24).reshape(4, 6).astype(dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path, {"t": value, "empty": value[:0]}))
    assert checkpoint.read("t").dtype == dtype
    np.testing.assert_array_equal(checkpoint.read("t"), value)
    assert checkpoint.read("empty").shape == (0, 6)


@pytest.mark.parametrize("where", [(slice(3, 5), slice(0, 6)), (slice(2, 8), slice(2, 5))])
def test_reads_no_more_of_a_matrix_than_is_wanted(tmp_path, monkeypatch, where):
    value = np.arange(48, dtype=np.float32).reshape(8, 6)
    checkpoint = open_checkpoint(write_folder(tmp_path, {"t": value}))
    read = []
    to = DataFile._read_to
    monkeypatch.setattr(DataFile, "_read_to", lambda *args: read.append(len(args[1])) or to(*args))
    out = np.empty(value[where].shape, np.float32)
    checkpoint.read_into("t", [Part(where, out)])
    np.testing.assert_array_equal(out, value[where])
    assert sum(read) == out.nbytes


def test_reads_an_old_file_whose_data_is_not_aligned(tmp_path):
    write_folder(tmp_path)
    value = np.arange(6, dtype=np.float32)
    header = b'{"t":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}'
    assert len(header) % 4
    data = struct.pack("<Q", len(header)) + header + value.tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("t"), value)


def test_other_types_are_named(tmp_path):
    write_folder(tmp_path, {"a": np.zeros(2, np.float32), "b.qweight": np.zeros(2, np.int32)})
    with pytest.raises(
        UnsupportedModelError, match=r"b.qweight \(I32\); supported: F32, F16, BF16"
    ):
        open_checkpoint(tmp_path).read("b.qweight")


def test_a_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=r"missing 1 of 3 .*: model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_a_truncated_shard_is_named(tmp_path):
    write_folder(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for size in (len(whole) - 1, 200, 12):
        shard.write_bytes(whole[:size])
        with pytest.raises(CheckpointFormatError, match=r"00002-of-00002.safetensors is truncated"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"<html>log in</html>", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"GGUF\x03\x00\x00\x00" + bytes(60), "a GGUF file"),
        (b"", "an empty file"),
        (bytes(7), "unknown"),
    ],
)
def test_something_else_in_place_of_weights(tmp_path, content, looks):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=f"not a safetensors file.*{looks}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_something_else_in_place_of_json(tmp_path, name):
    write_folder(tmp_path, shards=2)
    (tmp_path / name).write_text("<html>log in</html>")
    with pytest.raises(CheckpointFormatError, match=f"{name} is not a JSON object.*HTML"):
        open_checkpoint(tmp_path)


def test_a_missing_config_is_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match="has no config"):
        open_checkpoint(tmp_path)


def test_a_missing_index_is_named(tmp_path):
    write_folder(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointFormatError, match=f"model-00001-of-00002.*no {INDEX}"):
        open_checkpoint(tmp_path)


def test_an_index_that_promises_too_much(tmp_path):
    write_folder(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointFormatError, match=r"ghost.weight \(model-00001"):
        open_checkpoint(tmp_path)
    index["weight_map"] = {"t": "../secret.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointFormatError, match=r"outside the folder.*secret"):
        open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointFormatError, match="no weight_map"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b'{"t": 1}                                ',
        b'{"t": {"dtype": "F32", "shape": [2]}}   ',
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"t": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        b'{"t": ' + b"[" * 100_000,
        b'{"t": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
    ],
)
def test_a_damaged_header(tmp_path, header):
    write_folder(tmp_path)
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointFormatError, match="damaged"):
        open_checkpoint(tmp_path)


def test_a_single_file_is_preferred_over_an_index(tmp_path):
    write_folder(tmp_path, shards=2)
    save_file({"t": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path).tensors) == ["t"]
