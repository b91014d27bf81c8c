"""SmoothQuant's search against plain numpy, and what it is for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import plain_references as references
import pytest
from layer_fixtures import layer_of

from llmjax.quantize import QuantizeConfig, nearest, smoothquant
from llmjax.quantize.grid import Grid
from llmjax.quantize.layer import Place
from llmjax.quantize.rounding import input_format

GRID = Grid(8, True, np.dtype(np.float32))


def rounded_inputs(x, static):
    greatest = np.abs(x).max() if static else np.abs(x).max(axis=1, keepdims=True)
    scale = greatest / 127.5
    return np.clip(np.round(x / scale), -128, 127) * scale


@pytest.mark.parametrize("static", [True, False])
def test_losses_of_scales(static):
    weight, x = references.matrices(0)
    scales = np.exp(np.random.default_rng(1).standard_normal((3, 64))).astype(np.float32)
    found = smoothquant.smoothing_losses(
        jnp.asarray(weight),
        jnp.asarray(x),
        jnp.asarray(np.abs(x).max(axis=0)),
        jnp.asarray(scales),
        grid=GRID,
        rounding=input_format("int8", static=static),
    )
    for scale, loss in zip(scales, found, strict=True):
        w = references.nearest(weight * scale, 8, 64, True)
        wanted = np.mean((rounded_inputs(x / scale, static) @ w.T - x @ weight.T) ** 2)
        assert float(loss) == pytest.approx(wanted, rel=0.02)


def test_candidates_are_the_papers():
    weight, x = references.matrices(2)
    greatest, most = np.abs(x).max(axis=0), np.abs(weight).max(axis=0)
    place = Place(("mlp.down",), "mlp.up", np.arange(64))
    [found] = smoothquant.candidates(place, greatest, weight, 0.8)
    np.testing.assert_allclose(found, greatest**0.8 / most**0.2, rtol=1e-4)
    assert len(smoothquant.candidates(place, greatest, weight, None)) == 22


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama2", "qwen25", "gemma2"])
def test_layers_answer_nearer_than_with_plain_int8(family, activations):
    errors = []
    for module, method in ((smoothquant, "smoothquant"), (nearest, "int8")):
        calibrated = method == "smoothquant" or activations == "static"
        settings = {"calibration": "unused.txt"} if calibrated else {}
        layer = layer_of(family)
        wanted = layer.outputs()
        module.quantise(layer, QuantizeConfig(method, activations=activations, **settings))
        errors.append(np.mean((layer.outputs() - wanted) ** 2))
    assert errors[0] < errors[1]
