"""How much inputs count: files of llama-imatrix, and what calibration text measures."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_cases import FIXTURES, folder_of

from llmjax.checkpoint import open_checkpoint
from llmjax.errors import ConfigError
from llmjax.quantize import QuantizeConfig, importance, quantize
from llmjax.quantize.calibration import calibration_windows
from llmjax.quantize.forward import embed
from llmjax.quantize.importance import measured_importance, read_importance
from llmjax.quantize.job import Job
from llmjax.quantize.layer import Layer, places_of
from llmjax.quantize.source import Source
from llmjax_kernels import native

K_QUANTISED = FIXTURES / "gguf" / "llama-q4_k_m.gguf"
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TEXT = "The quick brown fox jumps over the lazy dog, 42 times a day. " * 20

needs_native = pytest.mark.skipif(
    not native.available(), reason="the native kernels are not built, or forbidden"
)


def legacy(entries: dict[str, tuple[int, np.ndarray]], tail: bytes = b"") -> bytes:
    """What `llama-imatrix --output-format dat` writes."""
    data = struct.pack("<i", len(entries))
    for name, (calls, sums) in entries.items():
        data += struct.pack(f"<i{len(name)}sii", len(name), name.encode(), calls, len(sums))
        data += sums.astype("<f4").tobytes()
    return data + tail


def as_gguf(path: Path, entries: dict[str, tuple[list[float], np.ndarray]]) -> Path:
    """What `llama-imatrix` writes now."""
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (counts, sums) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", np.atleast_2d(sums).astype(np.float32))
        writer.add_tensor(f"{name}.counts", np.array(counts, np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_old_files(tmp_path):
    sums = np.arange(8, dtype=np.float32)
    path = tmp_path / "imatrix.dat"
    path.write_bytes(legacy({"a": (4, sums), "b": (0, sums)}, struct.pack("<ii3s", 7, 3, b"txt")))
    found = read_importance(path)
    np.testing.assert_array_equal(found["a"], sums / 4)
    np.testing.assert_array_equal(found["b"], sums)


def test_new_files(tmp_path):
    sums = np.arange(8, dtype=np.float32)
    entries = {"a": ([4.0], sums), "experts": ([2.0, 0.0], np.stack([sums, sums]))}
    found = read_importance(as_gguf(tmp_path / "imatrix.gguf", entries))
    np.testing.assert_array_equal(found["a"], sums / 4)
    np.testing.assert_array_equal(found["experts"], [*sums / 2, *np.ones(8)])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no importance matrix"),
        (b"{}", "no importance matrix"),
        (struct.pack("<i", 0), "which has no entries"),
        (struct.pack("<iii", 1, 100_000, 0), "a name of 100000 bytes"),
        (legacy({"a": (1, np.ones(8))})[:-4], "no importance matrix"),
        (legacy({"a": (1, np.ones(0))}), "0 values of a"),
        (legacy({"a": (1, -np.ones(8))}), "negative or not finite for a"),
        (b"GGUF", "no importance matrix"),
    ],
)
def test_damaged_files_are_refused(data, why, tmp_path):
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=why):
        read_importance(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"imatrix is .*no importance matrix"):
        read_importance(tmp_path / "imatrix.dat")


def test_sums_without_counts_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "imatrix")
    writer.add_tensor("a.in_sum2", np.ones((1, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="sums of a, but no counts"):
        read_importance(tmp_path / "x.gguf")


@needs_native
def test_files_weigh_what_is_written(tmp_path):
    rng = np.random.default_rng(0)
    entries = {f"blk.0.{n}.weight": ([9.0], rng.random(256) ** 8) for n in MATRICES}
    entries["token_embd.weight"] = ([9.0], np.ones(3))  # as llama.cpp lets it be
    imatrix = as_gguf(tmp_path / "imatrix.gguf", entries)
    floats = quantize(K_QUANTISED, tmp_path / "f.gguf", "gguf:F32", progress=False)
    settings = {"progress": False, "imatrix": str(imatrix)}
    with_it = open_checkpoint(quantize(floats, tmp_path / "w.gguf", "gguf:Q2_K", **settings))
    without = open_checkpoint(quantize(floats, tmp_path / "o.gguf", "gguf:Q2_K", progress=False))
    original = open_checkpoint(floats)
    for name in MATRICES:
        tensor = f"blk.0.{name}.weight"
        weight, wanted = entries[tensor][1], original.read(tensor)
        one, other = (((c.read(tensor) - wanted) ** 2 * weight).sum() for c in (with_it, without))
        assert one < other
    assert with_it.config["quantize.imatrix.file"] == "imatrix.gguf"
    assert with_it.config["quantize.imatrix.entries_count"] == len(MATRICES)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (
            {"blk.0.attn_q.weight": ([1.0], np.ones(64))},
            r"blk.0.attn_q.weight \(64 inputs, not 256",
        ),
        ({"blk.0.other.weight": ([1.0], np.ones(64))}, "it names none of its tensors"),
    ],
)
def test_files_of_other_models_are_refused(entries, why, tmp_path):
    imatrix = as_gguf(tmp_path / "imatrix.gguf", entries)
    with pytest.raises(ConfigError, match=f"of another model: .*{why}"):
        quantize(K_QUANTISED, tmp_path / "x.gguf", "gguf:F32", imatrix=str(imatrix), progress=False)


@pytest.mark.parametrize("family", ["llama3", "gemma3", "phi3"])
def test_measured_is_the_mean_square_of_inputs(family, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    settings = {"calibration": str(text), "num_samples": 6, "sequence_length": 64}
    config = QuantizeConfig.of("gguf:Q4_K_M", settings)
    source = open_checkpoint(folder_of(family, tmp_path))
    job, model = Job(source, tmp_path / "x.gguf", config, False), Source(source)
    names: dict[str, str] = {}

    def name_of(path: str) -> str:
        return names.setdefault(path, f"tensor of {path}")

    found = measured_importance(job, model, name_of)
    hidden = _hidden(job, model)
    for index in range(model.config.num_layers):
        parameters = model.layer(index)
        layer = Layer(
            index, model.config, parameters, [], lambda t: False, hidden, np.dtype(np.float32)
        )
        places = places_of(model.config)
        for place, inputs in zip(places, layer.inputs(places, gram=True), strict=True):
            for linear in place.linears:
                measured = found[f"tensor of layers.{index}.{linear}.weight"]
                np.testing.assert_allclose(measured, np.diag(inputs.gram), rtol=1e-4, atol=1e-6)
        hidden = layer.outputs()


def _hidden(job: Job, model: Source) -> np.ndarray:
    windows = calibration_windows(job.config, job.source.read_text_side().tokenizer)
    return embed(model.outer()["embed.weight"], windows, model.config)


@needs_native
def test_calibration_weighs_what_is_written(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    settings = {"calibration": str(text), "num_samples": 6, "sequence_length": 64}
    written = quantize(
        folder_of("phi3", tmp_path), tmp_path / "x.gguf", "gguf:Q4_0", progress=False, **settings
    )
    checkpoint = open_checkpoint(written)
    assert checkpoint.config["quantize.imatrix.dataset"] == "text.txt"
    # The fused projection counts as one.
    matrices = [name for name in checkpoint.tensors if "blk" in name and "norm" not in name]
    assert checkpoint.config["quantize.imatrix.entries_count"] == len(matrices)


@needs_native
def test_an_interrupted_run_goes_on_after_its_last_layer(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    settings = {"calibration": str(text), "num_samples": 6, "sequence_length": 64}
    folder, whole, computed = folder_of("llama3", tmp_path), importance._mean_squares, []

    def mean_squares(source, index, *rest):
        computed.append(index)
        if computed == [0, 1]:
            raise KeyboardInterrupt
        return whole(source, index, *rest)

    def run(name: str, method: str = "gguf:Q4_0") -> bytes:
        return quantize(folder, tmp_path / name, method, progress=False, **settings).read_bytes()

    expected = run("whole.gguf")
    monkeypatch.setattr(importance, "_mean_squares", mean_squares)
    with pytest.raises(KeyboardInterrupt):
        run("again.gguf")
    with pytest.raises(ConfigError, match="of a run with other settings"):
        run("again.gguf", "gguf:Q5_0")
    assert run("again.gguf") == expected
    assert computed == [0, 1, 1]
    assert not list(tmp_path.glob("again.gguf?*"))
