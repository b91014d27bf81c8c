"""Layers of tiny models, with something that flows through them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmjax.checkpoint import open_checkpoint
from llmjax.quantize.hub import layer_targets
from llmjax.quantize.layer import Layer, places_of
from llmjax.quantize.source import Source

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"


def layer_of(family: str, *, dtype: str = "float32", ignore: str = "none") -> Layer:
    """Layer 0 of a fixture, given random states of which some channels are large."""
    source = Source(open_checkpoint(FIXTURES / family))
    parameters = source.layer(0)
    targets = layer_targets(source.config, 0, {p: v.shape for p, v in parameters.items()})
    linears = {f"{name}.weight" for place in places_of(source.config) for name in place.linears}
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((4, 32, source.config.hidden_size)).astype(np.float32)
    hidden[..., ::9] *= 8
    return Layer(
        0,
        source.config,
        parameters,
        targets,
        lambda target: bool(linears & set(target.members)) and ignore not in target.name,
        hidden,
        np.dtype(dtype),
    )
