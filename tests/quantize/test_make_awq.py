"""AWQ's searches against plain numpy, and what they are for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import plain_references as references
import pytest
from layer_fixtures import layer_of

from llmjax.quantize import QuantizeConfig, awq
from llmjax.quantize.grid import Grid
from llmjax.quantize.layer import Place


def grid(symmetric: bool) -> Grid:
    return Grid(4, symmetric, np.dtype(np.float32))


@pytest.mark.parametrize("symmetric", [True, False])
def test_losses_of_scales(symmetric):
    weight, x = references.matrices(0)
    scales = np.exp(np.random.default_rng(1).standard_normal((3, 64))).astype(np.float32)
    gram = jnp.asarray(x.T @ x / len(x))
    found = awq.scale_losses(
        jnp.asarray(weight), gram, jnp.asarray(scales), grid=grid(symmetric), group=16
    )
    for scale, loss in zip(scales, found, strict=True):
        rounded = references.nearest(weight * scale, 4, 16, symmetric) / scale
        wanted = references.output_error(weight, rounded, x) / weight.size * 64 / len(x)
        assert float(loss) == pytest.approx(wanted, rel=0.02)


def test_candidates_are_powers_of_what_flows_in():
    weight, x = references.matrices(2)
    mean = np.abs(x).mean(axis=0)
    place = Place(("mlp.down",), "mlp.up", np.arange(64))
    scales = awq.candidates(place, mean, weight, 16)
    assert len(scales) == 2 * awq.RATIOS
    np.testing.assert_allclose(scales[0], 1)
    half = mean**0.5
    np.testing.assert_allclose(scales[10], half / np.sqrt(half.max() * half.min()), rtol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_takes_the_range_of_least_error_in_each_group(symmetric):
    weight, x = references.matrices(3)
    weight[::3, ::7] *= 6
    gram = (x.T @ x / len(x)).astype(np.float32)
    found = awq.rounded(weight, jnp.asarray(gram), grid(symmetric), 16, 10).values
    errors = []
    for step in range(10):
        shrink = 1 - 0.05 * step
        most = np.abs(weight).reshape(24, 4, 16).max(axis=2, keepdims=True) * shrink
        kept = np.clip(weight.reshape(24, 4, 16), -most, most).reshape(24, 64)
        errors.append(group_errors(weight, references.nearest(kept, 4, 16, symmetric), gram))
    best = np.min(errors, axis=0)
    ours = group_errors(weight, found, gram)
    plain = awq.rounded(weight, jnp.asarray(gram), grid(symmetric), 16, 1).values
    assert (ours <= 1.001 * group_errors(weight, plain, gram)).all()
    assert (ours < 0.9 * group_errors(weight, plain, gram)).any()
    # What is clipped lies between two codes, and may fall to either.
    assert ours.sum() == pytest.approx(best.sum(), rel=0.2)
    assert np.median(np.abs(ours / best - 1)) < 0.02


def group_errors(weight, rounded, gram):
    error = (rounded - weight).reshape(24, 4, 16).astype(np.float64)
    own = np.stack([gram[g : g + 16, g : g + 16] for g in range(0, 64, 16)])
    return np.einsum("ngi,gij,ngj->ng", error, own, error)


@pytest.mark.parametrize("family", ["llama2", "qwen25", "gemma2", "olmo2"])
def test_layers_answer_nearer_than_by_rounding_to_nearest(family):
    config = QuantizeConfig("awq", group_size=16, calibration="unused.txt")
    plain = QuantizeConfig("awq", group_size=16, calibration="unused.txt", clip=False)
    errors = {}
    for name, settings in (("clipped", config), ("scaled", plain)):
        layer = layer_of(family)
        wanted = layer.outputs()
        awq.quantise(layer, settings)
        errors[name] = np.mean((layer.outputs() - wanted) ** 2)
    layer = layer_of(family)
    for target in [t for place in layer.places for t in layer.targets_at(place)]:
        weight = layer.weight(target)
        rounded = references.nearest(weight, 4, 16, False).astype(np.float32)
        layer.parameters |= target.split(rounded)
    nearest = np.mean((layer.outputs() - wanted) ** 2)
    assert errors["scaled"] < nearest
    assert errors["clipped"] < nearest
