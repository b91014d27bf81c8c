"""Every family against transformers, on the tiny models that tests/oracles made."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding
from paged import run_mixed

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.architecture import architecture_from_hf
from llmjax.checkpoint.load import load_weights
from llmjax.models import Decoder, DecoderConfig
from llmjax.models.weights import WeightTable

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


def merged(checkpoint: Checkpoint, config: DecoderConfig, table: WeightTable) -> Decoder:
    one_device = SingleDeviceSharding(jax.devices()[0])
    float32 = jnp.dtype("float32")
    return nnx.merge(
        *load_weights(checkpoint, config, table, float32, lambda *_: one_device, progress=False)
    )


def load(name: str) -> tuple[Decoder, dict]:
    folder = FIXTURES / name
    weights = folder if (folder / "model.safetensors").exists() else folder.parent
    architecture = architecture_from_hf(folder, json.loads((folder / "config.json").read_text()))
    return merged(open_checkpoint(weights), *architecture), dict(np.load(folder / "ref.npz"))


def load_gguf(name: str) -> Decoder:
    checkpoint = open_checkpoint(FIXTURES / "gguf" / f"{name}.gguf")
    return merged(checkpoint, *checkpoint.read_architecture())


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
