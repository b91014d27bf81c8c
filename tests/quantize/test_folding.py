"""Scales that are folded change nothing in floats."""

from __future__ import annotations

import numpy as np
import pytest
from layer_fixtures import layer_of

from llmjax.quantize.folding import fold, gathered

FAMILIES = ["llama2", "llama_bias", "qwen25", "qwen3", "gemma2", "phi3", "olmo2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay(family):
    layer = layer_of(family)
    before, rng = layer.outputs(), np.random.default_rng(1)
    folded = 0
    for place in layer.places:
        if place.before is not None:
            channels = place.channels.max() + 1
            fold(layer, place, np.exp(rng.standard_normal(channels)).astype(np.float32))
            folded += 1
    assert folded == (2 if family == "olmo2" else 4)
    after = layer.outputs()
    assert np.abs(after - before).max() < 1e-5 * np.abs(before).max()


@pytest.mark.parametrize("family", ["llama2", "gemma2"])
def test_inputs_are_divided_by_what_comes_back(family):
    """Also where a norm is stored in few bits: matrices take what its rounding leaves."""
    layer = layer_of(family, dtype="float16")
    place = layer.places[0]
    [before] = layer.inputs([place])
    [was] = [layer.parameters[f"{place.linears[0]}.weight"]]
    rng = np.random.default_rng(2)
    across = fold(layer, place, np.exp(rng.standard_normal(len(place.channels))))
    [after] = layer.inputs([place])
    np.testing.assert_allclose(after.mean, before.mean / across, rtol=1e-5)
    np.testing.assert_allclose(
        layer.parameters[f"{place.linears[0]}.weight"], was * across, rtol=1e-6
    )


def test_a_value_head_serves_several_query_heads():
    layer = layer_of("qwen25")
    [place] = [place for place in layer.places if place.before == "attn.v"]
    N, K, H = layer.config.num_heads, layer.config.num_kv_heads, layer.config.head_dim
    assert N > K
    values = np.arange(N * H, dtype=np.float32)
    wanted = values.reshape(K, N // K, H).max(axis=1).ravel()
    np.testing.assert_array_equal(gathered(place, values, np.maximum), wanted)
