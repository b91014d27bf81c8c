"""`llmjax.quantize` from end to end, on tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import llmjax
from llmjax.checkpoint import convert, load_model, open_checkpoint
from llmjax.errors import ConfigError, UnsupportedModelError
from llmjax.quantize import layerwise
from llmjax.quantize.layer import Layer
from llmjax_serving.cli import main

TEXT = "The quick brown fox jumps over the lazy dog, and comes back by the way it came. " * 40


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return str(path)


def calibrated(text: str, **settings) -> dict:
    return {"calibration": text, "num_samples": 4, "sequence_length": 32} | settings


def quantised(src: Path, dst: Path, method: str, monkeypatch, **settings) -> dict[str, np.ndarray]:
    """Writes a folder; gives the matrices that it should hold, by decoder path."""
    found: dict[str, np.ndarray] = {}
    put = Layer.put

    def noted(layer, target, coded):
        put(layer, target, coded)
        parts = target.split(coded.values)
        found.update({f"layers.{layer.index}.{path}": value for path, value in parts.items()})

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "put", noted)
        assert llmjax.quantize(src, dst, method, progress=False, **settings) == dst
    return found


def loaded(folder: Path) -> dict[str, np.ndarray]:
    state = load_model(folder, dtype="float32", progress=False).state
    return {".".join(map(str, k)): np.asarray(v[...]) for k, v in nnx.to_flat_state(state)}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen25", {"group_size": 32}),
        ("qwen25", {"group_size": 16, "desc_act": True, "symmetric": False}),
        ("qwen25", {"group_size": -1, "bits": 8}),
        ("phi3", {"group_size": 16}),
        ("gemma2", {"group_size": 8, "bits": 3, "dtype": "float16"}),
        ("smollm2", {"group_size": 16, "bits": 2}),
    ],
)
def test_gptq_loads_as_it_was_made(make_model, tmp_path, text, monkeypatch, family, settings):
    src, dst = make_model(family), tmp_path / "out"
    made = quantised(src, dst, "gptq", monkeypatch, **calibrated(text, **settings))
    found, floats = loaded(dst), loaded(src)
    assert len(made) == 7 * len({path.split(".")[1] for path in made})
    for path, value in made.items():
        np.testing.assert_array_equal(found.pop(path), value, err_msg=path)
    for path, value in found.items():
        np.testing.assert_allclose(value, floats[path], rtol=1e-3, atol=1e-3, err_msg=path)
    config = json.loads((dst / "config.json").read_text())
    assert config["quantization_config"]["bits"] == settings.get("bits", 4)


METHODS = {
    "awq": {"group_size": 16},
    "smoothquant": {"activations": "static"},
    "int8": {},
    "int4": {"group_size": 16},
    "fp8": {"granularity": "tensor"},
    "mxfp4": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_a_whole_folder(make_model, tmp_path, text, monkeypatch, method):
    src, dst = make_model("qwen25"), tmp_path / "out"
    settings = METHODS[method]
    if method in ("awq", "smoothquant"):
        settings = calibrated(text, **settings)
    quantised(src, dst, method, monkeypatch, **settings)
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert {f.name for f in dst.glob("*.safetensors")} == files
    scale = {"awq": "scales"}.get(method, "weight_scale")
    assert f"model.layers.1.mlp.down_proj.{scale}" in index["weight_map"]
    assert "model.embed_tokens.weight" in index["weight_map"]
    names = {f.name for f in dst.iterdir()} - files
    text_files = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "model.safetensors.index.json", *text_files}


def test_an_interrupted_run_goes_on(make_model, tmp_path, text, monkeypatch):
    src, settings = make_model("qwen25"), calibrated(text, group_size=32)
    llmjax.quantize(src, tmp_path / "whole", "gptq", progress=False, **settings)
    plain, seen = layerwise.QUANTISE["gptq"], []

    def fails_once(layer, config):
        seen.append(layer.index)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        plain(layer, config)

    monkeypatch.setitem(layerwise.QUANTISE, "gptq", fails_once)
    with pytest.raises(KeyboardInterrupt):
        llmjax.quantize(src, tmp_path / "out", "gptq", progress=False, **settings)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=r"out.partial is of a run with other settings"):
        llmjax.quantize(src, tmp_path / "out", "gptq", progress=False, **settings | {"damp": 0.1})
    llmjax.quantize(src, tmp_path / "out", "gptq", progress=False, **settings)
    assert seen[:3] == [0, 1, 1]
    whole = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*"))
    assert whole == sorted(p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*"))
    for name in whole:
        same = (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
        assert same, name
    assert not (tmp_path / "out.partial").exists()


def test_ignored_layers_stay_floats(make_model, tmp_path, monkeypatch):
    src, dst = make_model("qwen25"), tmp_path / "out"
    rules = ["lm_head", "v_proj", "re:model.layers.0.*down_proj", "model.layers.1.mlp.up_proj"]
    made = quantised(src, dst, "int8", monkeypatch, ignore=rules)
    kept = {"layers.0.attn.v", "layers.1.attn.v", "layers.0.mlp.down", "layers.1.mlp.up"}
    assert not made.keys() & {f"{path}.weight" for path in kept}
    assert {"layers.1.mlp.down.weight", "layers.0.mlp.up.weight"} <= made.keys()
    names = json.loads((dst / "config.json").read_text())["quantization_config"]["ignore"]
    assert names == [
        "lm_head",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
    ]


def test_orbax_sources(make_model, tmp_path, text):
    """What `llmjax convert` wrote is quantised to what its own source is."""
    src = make_model("qwen25")
    convert(src, tmp_path / "orbax", progress=False)
    settings = calibrated(text, group_size=32)
    llmjax.quantize(src, tmp_path / "a", "gptq", progress=False, **settings)
    llmjax.quantize(tmp_path / "orbax", tmp_path / "b", "gptq", progress=False, **settings)
    assert not (tmp_path / "b" / "llmjax.json").exists()
    one, other = loaded(tmp_path / "a"), loaded(tmp_path / "b")
    for path, value in one.items():
        np.testing.assert_array_equal(other[path], value, err_msg=path)


def test_quantised_sources_are_read_as_their_values(make_model, tmp_path, text):
    src, settings = make_model("qwen25"), calibrated(text, group_size=32)
    llmjax.quantize(src, tmp_path / "a", "gptq", progress=False, bits=8, **settings)
    llmjax.quantize(tmp_path / "a", tmp_path / "b", "gptq", progress=False, **settings)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization_config"]["bits"] == 4
    assert len(open_checkpoint(tmp_path / "b").matrices) == 14


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("gptq4", {}, r"method is 'gptq4', allowed: gptq, awq"),
        ("gptq", {}, r"calibration is None"),
        ("gptq", {"calibration": "x.txt", "bits": 5}, r"bits is 5, allowed: 2, 3, 4, 8"),
        ("awq", {"calibration": "x.txt", "bits": 3}, r"bits is 3, allowed: 4"),
        ("int4", {"bits": 3}, r"bits is 3, which method int4 has no use for"),
        ("int8", {"alpha": 0.5}, r"alpha is 0.5, which method int8 has no use for"),
        ("int8", {"activations": "token"}, r"activations is 'token', allowed: none, dynamic"),
        ("int8", {"calibration": "x.txt"}, r"has no use for unless activations are static"),
        ("int8", {"group_size": 32, "activations": "dynamic"}, r"group_size is 32, allowed: -1"),
        ("fp8", {"granularity": "row"}, r"granularity is 'row'"),
        ("mxfp4", {"group_size": 32}, r"group_size is 32, which method mxfp4"),
        ("gptq", {"calibration": "x.txt", "static_groups": True}, r"with desc_act alone"),
        ("gptq", {"calibration": "x.txt", "alpha": 0.5}, r"alpha"),
        ("int4", {"group_size": True}, r"group_size is True, allowed: an integer"),
        ("int4", {"grupo": 3}, r"no setting is called 'grupo'"),
        ("int8", {"ignore": ["down_proj"]}, r"allowed: with 'lm_head' in it"),
        ("int8", {"ignore": ["lm_head", "re:("]}, r"'re:\(', which is no pattern"),
        ("gptq", {"calibration": "/nowhere/x.txt"}, r"cannot be read"),
    ],
)
def test_settings_that_are_refused(tiny_model, tmp_path, method, settings, said):
    with pytest.raises(ConfigError, match=said):
        llmjax.quantize(tiny_model, tmp_path / "out", method, progress=False, **settings)
    assert not (tmp_path / "out").exists()


def test_a_destination_that_exists_is_left_alone(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="exists already"):
        llmjax.quantize(tiny_model, tmp_path, "int8", progress=False)


def test_values_that_are_not_finite_name_the_layer(make_model, tmp_path, text):
    from safetensors.numpy import load_file, save_file

    src = make_model("qwen25")
    tensors = load_file(src / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, src / "model.safetensors")
    with pytest.raises(llmjax.errors.CheckpointFormatError, match=r"layers.1.mlp.up_proj"):
        llmjax.quantize(src, tmp_path / "out", "int8", progress=False)


def test_encoders_are_refused(tmp_path):
    folder = tmp_path / "bert"
    folder.mkdir()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"intermediate_size": 8, "vocab_size": 8, "max_position_embeddings": 8}
    config = {"architectures": ["BertModel"], **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(
        Path(__file__).parents[1] / "models/fixtures/smollm2/model.safetensors",
        folder / "model.safetensors",
    )
    with pytest.raises(UnsupportedModelError, match="encoder"):
        llmjax.quantize(folder, tmp_path / "out", "int8", progress=False)


def test_command_line(make_model, tmp_path, text, capsys):
    src, dst = make_model("qwen25"), tmp_path / "out"
    flags = ["--method", "gptq", "--group-size", "32", "--desc-act", "--calibration", text]
    sizes = ["--num-samples", "2", "--sequence-length", "16"]
    assert main(["quantize", str(src), str(dst), *flags, *sizes]) == 0
    out = capsys.readouterr()
    assert out.out.strip() == str(dst)
    assert "quantising (gptq): 100%" in out.err
    with pytest.raises(SystemExit):
        main(["quantize", str(src), str(tmp_path / "other")])
    assert "a method is needed" in capsys.readouterr().err
    assert main(["quantize", str(src), str(dst), *flags]) == 1
    assert "exists already" in capsys.readouterr().err


def test_calibration_files(make_model, tmp_path):
    from llmjax.quantize import QuantizeConfig
    from llmjax.quantize.calibration import calibration_windows

    tokenizer = open_checkpoint(make_model("qwen25")).read_text_side().tokenizer
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "abcdef"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    config = QuantizeConfig("gptq", calibration=str(path), num_samples=99, sequence_length=8)
    windows = calibration_windows(config, tokenizer)
    whole = tokenizer.encode("abcdef\n\n<|user|>hi</s>", False)
    assert windows.tolist() == [whole[:8], whole[-8:]] if len(whole) < 24 else len(windows) == 3
    for bad in ('{"text": 3}', "[1]", "no json"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"line 1 is"):
            calibration_windows(config, tokenizer)
    path.write_text('{"text": "abc"}')
    with pytest.raises(ConfigError, match="a text of 3 tokens"):
        calibration_windows(config, tokenizer)
