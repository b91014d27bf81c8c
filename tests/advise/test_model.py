"""Shapes of all that can be opened, beside the tensors of their checkpoints."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

import pytest

from llmjax.advise.advice import Advice
from llmjax.advise.advisor import advise_on
from llmjax.advise.estimate import Memory
from llmjax.advise.model import find
from llmjax.advise.question import Question
from llmjax.checkpoint import open_checkpoint
from llmjax.errors import (
    CheckpointFormatError,
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from llmjax.simulate.shapes import SHAPES, find_shape

FIXTURES = Path(__file__).parents[1] / "models/fixtures"
FOLDERS = sorted(
    str(path.parent.relative_to(FIXTURES))
    for path in FIXTURES.rglob("model.safetensors")
    if (path.parent / "config.json").exists()
)
FILES = sorted(path.name for path in (FIXTURES / "gguf").glob("*.gguf"))


def parameters(path: Path) -> int:
    """Of a checkpoint's matrices."""
    shapes = [info.shape for info in open_checkpoint(path).tensors.values()]
    return sum(prod(shape) for shape in shapes if len(shape) == 2)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_every_family(name):
    found = find(str(FIXTURES / name))
    assert found.shape.num_params == parameters(FIXTURES / name)
    assert found.quantised is None
    assert found.name == name.rpartition("/")[2]


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_of_every_family(name):
    found = find(str(FIXTURES / "gguf" / name))
    assert found.shape.num_params == parameters(FIXTURES / "gguf" / name)
    kinds = {"llama3-q8_0.gguf": "Q8_0", "llama-q4_k_m.gguf": "Q4_K"}
    assert found.quantised == kinds.get(name)
    assert found.name == name.removesuffix(".gguf")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_config_alone_is_enough(name, tmp_path):
    folder = tmp_path / "Some-Model"
    folder.mkdir()
    shutil.copy(FIXTURES / name / "config.json", folder)
    for path in (folder, folder / "config.json", f"{folder}/"):
        found = find(str(path))
        assert found.shape == find(str(FIXTURES / name)).shape
        assert found.name == "some-model"


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gemma2", {None: 2, 32: 2}),
        ("gemma3", {None: 1, 32: 6}),
        ("mistral", {32: 2}),
        ("llama2", {None: 2}),
    ],
)
def test_windows_are_those_of_the_family(name, windows):
    shape = find(str(FIXTURES / name)).shape
    found = {window: shape.windows.count(window) for window in set(shape.windows)}
    assert found == windows


def config(**changes) -> dict:
    read = json.loads((FIXTURES / "llama3" / "config.json").read_text())
    return read | {"max_position_embeddings": 4096, "num_hidden_layers": 4} | changes


def write(folder: Path, settings: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def test_quantised_checkpoints_have_the_shape_of_their_floats(tmp_path):
    method = {"quant_method": "awq", "bits": 4}
    floats = find(write(tmp_path / "floats", config()))
    awq = find(write(tmp_path / "awq", config(quantization_config=method)))
    assert awq.shape == floats.shape
    assert (floats.quantised, awq.quantised) == (None, "awq")


def floats(advice: Advice) -> Memory:
    """Of bfloat16 weights and pages."""
    [found] = [c for c in advice.candidates if (c.scheme, c.kv_dtype) == ("bf16", "bfloat16")]
    return found.memory


def test_a_window_bounds_what_a_request_takes(tmp_path):
    sizes = {"input_len": 2000, "output_len": 48, "int8_tops": 1.0, "bandwidth_gbs": 20.0}
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    full, bounded = config(), config(**mistral)
    folders = write(tmp_path / "full", full), write(tmp_path / "bounded", bounded)
    one, other = (floats(advise_on(Question(f, "cpu", memory_gb=16.0, **sizes))) for f in folders)
    assert one.kv_token == other.kv_token  # while it is in all windows
    # 64 tokens, a chunk of 512 and a unit of 64 in pages of 16, and three more.
    assert other.request == one.request * (40 + 3) // 128


def test_names_that_a_simulation_knows_are_those_of_published_configs():
    assert find("llama-3-8b").shape is SHAPES["llama-3-8b"]


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith(("llama", "smol"))])
def test_a_simulation_reads_the_same_shape(name):
    assert find_shape(str(FIXTURES / name)) == find(str(FIXTURES / name)).shape


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMJAX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFoundError, match=r"no model is called 'gpt-2'.*llama-3-8b"):
        find("gpt-2")
    with pytest.raises(
        ModelNotFoundError, match="gemma-3-270m is not on this machine; `llmjax pull"
    ):
        find("gemma-3-270m")
    with pytest.raises(ModelNotFoundError, match="no/such-repo is not on this machine"):
        find("no/such-repo")
    with pytest.raises(ModelNotFoundError, match="/no/such/folder does not exist"):
        find("/no/such/folder")
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM"):
        find(write(tmp_path / "moe", config(architectures=["MixtralForCausalLM"])))
    with pytest.raises(CheckpointFormatError, match="hidden_size"):
        find(write(tmp_path / "headless", config(hidden_size=None)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFormatError, match="not a JSON object"):
        find(str(tmp_path))
    long = Question(write(tmp_path / "short", config()), "h100", input_len=4000, output_len=97)
    with pytest.raises(ConfigError, match="4,097 together, allowed: the 4,096 tokens"):
        advise_on(long)
