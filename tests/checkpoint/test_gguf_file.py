"""GGUF files: every type, and every way of being something else."""

from __future__ import annotations

import os
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian
from safetensors.numpy import save_file
from tiny_files import finish, gguf_tensors, new_writer, write_gguf

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.base import Part
from llmjax.checkpoint.gguf_file import readable_types
from llmjax.errors import CheckpointFormatError, ModelNotFoundError, UnsupportedModelError

LANGUAGE_MODEL_TYPES = (  # noqa: SIM905
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS "
    "IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"
).split()
ROWS, COLUMNS = 300, 1024


def stored(type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes of a type; no scale is infinite, as bit 6 of every byte is off."""
    rng = np.random.default_rng(len(type_name))
    if type_name in ("F32", "F16"):
        return rng.standard_normal(shape).astype("f4" if type_name == "F32" else "f2")
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    shape = (*shape[:-1], shape[-1] // block * nbytes)
    return rng.integers(0, 256, shape, np.uint8) & np.uint8(0xBF)


@pytest.fixture
def one_tensor(tmp_path):
    def write(type_name: str, shape: tuple[int, ...] = (ROWS, COLUMNS)):
        data = stored(type_name, shape)
        writer = new_writer(tmp_path / f"{type_name}.gguf")
        writer.add_tensor("before", np.zeros(3, np.float32))
        writer.add_tensor("t", data, raw_dtype=GGMLQuantizationType[type_name])
        finish(writer)
        return open_checkpoint(tmp_path / f"{type_name}.gguf"), data

    return write


@pytest.mark.parametrize("type_name", LANGUAGE_MODEL_TYPES)
def test_reads_what_the_gguf_package_dequantises(one_tensor, type_name):
    checkpoint, data = one_tensor(type_name)
    expected = quants.dequantize(data, GGMLQuantizationType[type_name])
    found = checkpoint.read("t")
    assert checkpoint.tensors["t"] == ((ROWS, COLUMNS), type_name)
    assert found.dtype == readable_types()[type_name]
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q4_K", "Q8_0"])
def test_reads_parts_into_their_places(one_tensor, type_name):
    checkpoint, data = one_tensor(type_name)
    whole = quants.dequantize(data, GGMLQuantizationType[type_name])
    rows = Part((slice(7, 290), slice(0, COLUMNS)), np.empty((283, COLUMNS), np.float32))
    columns = Part((slice(0, ROWS), slice(5, 9)), np.empty((ROWS, 4), ml_dtypes.bfloat16))
    checkpoint.read_into("t", [rows, columns])
    np.testing.assert_array_equal(rows.out, whole[7:290])
    np.testing.assert_array_equal(columns.out, whole[:, 5:9].astype(ml_dtypes.bfloat16))


def test_reads_a_quantised_vector_and_a_stack_of_matrices(one_tensor):
    for shape in ((COLUMNS,), (5, 3, 256)):
        checkpoint, data = one_tensor("Q4_K", shape)
        expected = quants.dequantize(data, GGMLQuantizationType.Q4_K)
        np.testing.assert_array_equal(checkpoint.read("t"), expected)


def test_a_type_without_a_dequantiser_is_named(tmp_path):
    writer = new_writer(tmp_path / "m.gguf")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 8), np.int32))
    finish(writer)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"attn_q.weight \(I32\).*supported:.*Q4_K"):
        checkpoint.require_readable(checkpoint.tensors)


def test_a_type_number_from_the_future_is_named(tmp_path):
    data = bytearray(write_gguf(tmp_path / "m.gguf", {"odd": np.zeros(8, "f4")}).read_bytes())
    at = data.index(struct.pack("<Q3sI", 3, b"odd", 1)) + 8 + 3 + 4 + 8
    data[at : at + 4] = struct.pack("<I", 999)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModelError, match="'odd' has the GGML type number 999"):
        open_checkpoint(tmp_path / "m.gguf")


def test_metadata_is_what_the_gguf_package_reads(tmp_path):
    writer = new_writer(tmp_path / "m.gguf")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 1 << 40)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 😀")
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["", "ä", "b" * 300])
    writer.add_tensor("t", np.zeros(8, np.float32))
    finish(writer)
    theirs = gguf.GGUFReader(tmp_path / "m.gguf").fields
    ours = open_checkpoint(tmp_path / "m.gguf").config
    assert ours == {k: f.contents() for k, f in theirs.items() if not k.startswith("GGUF.")}
    assert {type(value) for value in ours.values()} == {int, float, bool, str, list}


@pytest.fixture
def split(tmp_path):
    write_gguf(tmp_path / "m.gguf", split_max_tensors=8)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_a_split_model_opens_from_any_part(split):
    assert len(split) == 3
    for part in split:
        checkpoint = open_checkpoint(part)
        assert checkpoint.config["llama.block_count"] == 2
        for name, value in gguf_tensors().items():
            np.testing.assert_array_equal(checkpoint.read(name), value)
    assert open_checkpoint(split[0].parent).tensors == checkpoint.tensors


def test_a_missing_part_is_named(split):
    split[1].unlink()
    with pytest.raises(CheckpointFormatError, match=r"missing beside it: m-00002-of-00003.gguf"):
        open_checkpoint(split[2])


def test_renamed_parts_are_noticed(split):
    alone = split[0].rename(split[0].with_name("alone.gguf"))
    with pytest.raises(CheckpointFormatError, match=r"name like model-00001-of-00003\.gguf"):
        open_checkpoint(alone)
    alone.rename(split[0])
    swap = split[1].rename(split[1].with_name("swap"))
    split[2].rename(split[1])
    swap.rename(split[2])
    with pytest.raises(CheckpointFormatError, match="part 3 by its content"):
        open_checkpoint(split[0])


LOOKALIKES = {
    "an HTML or XML page": b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>",
    "a git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
    "Repository not found.*an error answer in place": b'{"error":"Repository not found"}',
    "a JSON document": b'{"a": 1}',
    "plain text: Entry not found": b"Entry not found",
    "an empty file": b"",
    "a zip archive": b"PK\x03\x04" + bytes(60),
    "a Python pickle": b"\x80\x02}q\x00" + bytes(60),
    "a gzip archive": b"\x1f\x8b\x08" + bytes(60),
    "a GGML file from before GGUF": b"tjgg\x03\x00\x00\x00" + bytes(60),
    "a GGUF file of version 1": b"GGUF\x01\x00\x00\x00" + bytes(60),
    "a GGUF file of version 9": b"GGUF\x09\x00\x00\x00" + bytes(60),
    "a big-endian GGUF file": b"GGUF\x00\x00\x00\x03" + bytes(60),
    "unknown": bytes(range(128, 228)),
}


@pytest.mark.parametrize("looks", LOOKALIKES)
def test_says_what_a_file_looks_like(tmp_path, looks):
    (tmp_path / "m.gguf").write_bytes(LOOKALIKES[looks])
    with pytest.raises(CheckpointFormatError, match=looks):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_real_big_endian_file_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", endianess=GGUFEndian.BIG)
    with pytest.raises(CheckpointFormatError, match="big-endian"):
        open_checkpoint(tmp_path / "m.gguf")


def test_safetensors_and_folders_are_recognised(tmp_path):
    save_file({"t": np.zeros(4, np.float32)}, tmp_path / "m.gguf")
    with pytest.raises(CheckpointFormatError, match="a safetensors file"):
        open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "absent.gguf")
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(CheckpointFormatError, match=r"it is empty; expected a \.gguf file"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointFormatError, match="PyTorch pickles"):
        open_checkpoint(tmp_path)


def test_a_folder_with_one_model_opens_and_with_two_does_not(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "mmproj-a.gguf", {"v.t": np.zeros(8, np.float32)})
    assert open_checkpoint(tmp_path).path.name == "a.gguf"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointFormatError, match=r"several GGUF models.*a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_every_truncation_is_noticed(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(8, 12000, 97), len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointFormatError, match=r"truncated: it has [\d,]+ bytes"):
            open_checkpoint(cut)


def test_a_file_that_shrinks_once_it_is_open_is_named(one_tensor):
    checkpoint, _ = one_tensor("F32")
    os.truncate(checkpoint.path, 8192)
    with pytest.raises(CheckpointFormatError, match=r"F32\.gguf became shorter"):
        checkpoint.read("t")


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<QQ", 0, 1 << 62),  # keys without end
        struct.pack("<QQ", 1 << 62, 0),  # tensors without end
        struct.pack("<QQQ", 0, 1, 1 << 60),  # a key of an exabyte
        struct.pack("<QQQ1sIQ", 0, 1, 1, b"k", 8, 1 << 60),  # a string of an exabyte
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, 1 << 60),  # as many strings
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 6, 1 << 60),  # as many floats
        struct.pack("<QQQ1sI", 0, 1, 1, b"k", 77),  # a value of an unknown type
        struct.pack("<QQQ1sI", 1, 0, 1, b"t", 900),  # 900 dimensions
    ],
)
def test_absurd_headers_are_refused(tmp_path, tail):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + tail + bytes(100))
    with pytest.raises(CheckpointFormatError, match=r"truncated|damaged"):
        open_checkpoint(tmp_path / "m.gguf")
