"""A model whose channels are in another order is what it was."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.bench.reorder import reordered
from llmjax.checkpoint import open_checkpoint
from llmjax.models import DecoderConfig
from llmjax.nn.linear import project
from llmjax.nn.norm import RMSNorm
from llmjax.quantize.forward import embed, run_layer
from llmjax.quantize.source import Source

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
IDS = np.arange(7, 19)[None] * 5 % 256


def logits(arrays: dict[str, np.ndarray], config: DecoderConfig) -> np.ndarray:
    hidden = jnp.asarray(embed(arrays["embed.weight"], IDS, config))
    for i in range(config.num_layers):
        start = f"layers.{i}."
        part = {p.removeprefix(start): a for p, a in arrays.items() if p.startswith(start)}
        hidden, _ = run_layer(part, {}, hidden, config=config, index=i)
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight.set_value(jnp.asarray(arrays["norm.weight"]))
    head = arrays["embed.weight" if config.tie_embeddings else "head.weight"]
    return np.asarray(project(norm(hidden[0]), jnp.asarray(head)))


@pytest.mark.parametrize("family", ["llama2", "qwen25"])
def test_logits_stay(family):
    source = Source(open_checkpoint(FIXTURES / family))
    arrays = source.read(source.shapes.keys())
    changed = reordered(arrays, source.config)
    down = "layers.0.mlp.down.weight"
    assert not np.array_equal(arrays[down], changed[down])
    expected = logits(arrays, source.config)
    np.testing.assert_allclose(logits(changed, source.config), expected, atol=1e-5)
