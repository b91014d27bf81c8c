"""Every family against transformers, on the tiny models that tests/oracles made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paged import run_mixed
from safetensors.numpy import load_file

from llmjax.models import FAMILIES, Decoder, DecoderConfig
from llmjax.models.rope_config import ROPE_TENSORS

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = sorted(str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.rglob("config.json"))
PAGED = [  # one of each family
    "llama2",
    "mistral",
    "qwen2/window",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3/longrope_partial",
    "granite",
    "olmo2",
]
# the twin that each GGUF file was written from; None: it has answers of its own
GGUF_TWINS = {
    "llama3": "llama3",
    "smollm2": "smollm2",
    "llama_yarn": "rope/yarn",
    "mistral": "mistral/full",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2/head_scalar",
    "gemma3": "gemma3/linear",
    "phi3": "phi3/longrope_partial",
    "granite": "granite",
    "olmo2": "olmo2",
    "llama3-q8_0": None,
    "llama-q4_k_m": None,
}


def family(architecture: str):
    return next(f for f in FAMILIES if architecture in (*f.ARCHITECTURES, *f.GGUF_ARCHITECTURES))


def fill(model: Decoder, table, config: DecoderConfig, tensors) -> Decoder:
    """Sets every parameter from the table, and sees that no tensor is left over."""
    state, used = nnx.to_flat_state(nnx.state(model)), set()
    for path, param in state:
        name = ".".join(map(str, path))
        layer = re.search(r"layers\.(\d+)\.", name)
        number = layer[1] if layer else ""
        source = table[name.replace(f"layers.{number}.", "layers.{i}.")]
        stored = source.name.replace("{i}", number)
        value = tensors[stored]
        used.add(stored)
        if source.transform:
            value = source.transform(value, config)
        assert value.shape == param.shape, name
        param[...] = jnp.asarray(value, param.dtype)
    assert used == set(tensors) - set(ROPE_TENSORS)
    nnx.update(model, nnx.from_flat_state(state))
    return model


def load(name: str) -> tuple[Decoder, dict]:
    folder = FIXTURES / name
    spec = json.loads((folder / "config.json").read_text())
    weights = folder if (folder / "model.safetensors").exists() else folder.parent
    f = family(spec["architectures"][0])
    config = f.read_config(spec)
    model = Decoder(config, jnp.dtype("float32"))
    tensors = load_file(weights / "model.safetensors")
    return fill(model, f.weights(config), config, tensors), dict(np.load(folder / "ref.npz"))


def load_gguf(name: str) -> Decoder:
    reader = gguf.GGUFReader(FIXTURES / "gguf" / f"{name}.gguf")
    tensors = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist())
        for t in reader.tensors
    }
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    metadata |= {key: tensors[key].tolist() for key in ROPE_TENSORS if key in tensors}
    f = family(metadata["general.architecture"])
    config = f.read_gguf_config(metadata, tensors)
    return fill(Decoder(config, jnp.dtype("float32")), f.gguf_weights(config), config, tensors)


def check(model: Decoder, ref: dict) -> None:
    logits = model(jnp.asarray(ref["ids"])).logits
    np.testing.assert_allclose(logits[ref["positions"]], ref["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    check(*load(name))


@pytest.mark.parametrize("name", PAGED)
def test_chunks_over_pages_give_the_logits_and_tokens_of_transformers(name):
    model, ref = load(name)
    logits, after_prompt, greedy = run_mixed(
        model, ref["ids"].tolist(), ref["prompt"].tolist(), len(ref["greedy"])
    )
    np.testing.assert_allclose(logits[ref["positions"]], ref["logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(after_prompt, ref["prompt_logits"], atol=1e-4, rtol=0)
    assert greedy == ref["greedy"].tolist()


@pytest.mark.parametrize("name", ["llama3", "gemma2", "granite", "olmo2"])
def test_hidden_states_are_those_of_transformers(name):
    model, ref = load(name)
    # what follows the prompt does not matter to it, and one length compiles once
    ids = np.concatenate([ref["prompt"], ref["ids"]])[: len(ref["ids"])]
    states = model(jnp.asarray(ids)).hidden_states
    # transformers norms the last one
    for ours, theirs in zip([*states[:-1], model.norm(states[-1])], ref["hidden"], strict=True):
        np.testing.assert_allclose(ours[: len(theirs)], theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GGUF_TWINS)
def test_gguf_file_has_the_logits_of_its_twin(name):
    path = f"{GGUF_TWINS[name]}/ref.npz" if GGUF_TWINS[name] else f"gguf/{name}.npz"
    check(load_gguf(name), dict(np.load(FIXTURES / path)))


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", ["mistral", "qwen2/window", "gemma3", "phi3"])
def test_reference_tells_windows_apart(name, change):
    """A window counts the current token; one token more or less is another model."""
    model, ref = load(name)
    for layer in model.layers:
        spec = layer.attn.spec
        if spec.window:
            layer.attn.spec = spec._replace(window=spec.window + change)
    logits = model(jnp.asarray(ref["ids"])).logits[ref["positions"]]
    assert np.abs(logits - ref["logits"]).max() > 1e-2
