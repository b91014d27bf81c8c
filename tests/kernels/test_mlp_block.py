"""The feed-forward block against jax.nn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import EPS, project, rms_norm
from random_weights import random_weight

from llmjax.nn.mlp import ACTIVATIONS
from llmjax_kernels.native.blocks import Projection, Residual, mlp_block
from llmjax_kernels.packed import pack_float

ROWS, TOKENS, D, F = 70, 67, 37, 83


def vector(rng: np.random.Generator, size: int, about: float = 0.0) -> jax.Array:
    return jnp.asarray(about + rng.standard_normal(size) * 0.3, jnp.float32)


def floats(rng: np.random.Generator, N: int, K: int) -> Projection:
    weight = pack_float((rng.standard_normal((N, K)) / np.sqrt(K)).astype(np.float32))
    return Projection(weight, vector(rng, N))


def expected_output(x, norm, gate, up, down, activation, residual: Residual):
    normed = x if norm is None else rms_norm(x, norm)
    out = project(ACTIVATIONS[activation](project(normed, gate)) * project(normed, up), down)
    if residual.post_norm is not None:
        out = rms_norm(out, residual.post_norm)
    return np.asarray(x + residual.scale * out)


@pytest.mark.every_isa
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "norms and biases"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_agrees_with_jax_nn(activation, plain):
    rng = np.random.default_rng(0)
    gate, up, down = floats(rng, F, D), floats(rng, F, D), floats(rng, D, F)
    if plain:
        gate, up, down = (p._replace(bias=None) for p in (gate, up, down))
    norm = None if plain else vector(rng, D, 1)
    residual = Residual() if plain else Residual(vector(rng, D, 1), 0.22)
    x = 3 * rng.standard_normal((ROWS, D)).astype(np.float32)
    found = mlp_block(
        x, norm, gate, up, down, activation, residual, EPS, np.array([TOKENS], np.int32)
    )
    expected = expected_output(x, norm, gate, up, down, activation, residual)
    np.testing.assert_allclose(found[:TOKENS], expected[:TOKENS], 2e-5, 2e-5)
    assert not np.asarray(found[TOKENS:]).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_saturate(activation):
    x = np.array([[-1e4, -90.0, -20, 0.0, 20, 88, 90, 1e4]], np.float32).T
    one = Projection(pack_float(np.ones((1, 1), np.float32)))
    found = mlp_block(x, None, one, one, one, activation, Residual(), EPS, np.array([8], np.int32))
    expected = x + np.asarray(ACTIVATIONS[activation](x)) * x
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    "formats",
    [
        ("Q4_K", "Q4_K", "Q6_K"),
        # Each has its inputs in an order of its own.
        ("4 bits in order", "8 bits in order", "4 bits with minima in order"),
        ("4 bits in order", "bfloat16", "8 bits with minima"),
    ],
)
def test_quantised_rows_do_not_depend_on_their_company(formats, set_threads):
    rng = np.random.default_rng(0)
    gate, up, down = (Projection(random_weight(f, 256, 256, rng)[0]) for f in formats)
    norm, residual = vector(rng, 256, 1), Residual(vector(rng, 256, 1))
    x = rng.standard_normal((70, 256)).astype(np.float32)
    block = jax.jit(lambda x, rows: mlp_block(x, norm, gate, up, down, "silu", residual, EPS, rows))
    set_threads(1)
    alone = np.concatenate([block(row[None], np.array([1], np.int32)) for row in x])
    expected = expected_output(x, norm, gate, up, down, "silu", residual)
    error = np.linalg.norm(alone - expected) / np.linalg.norm(expected - x)
    assert error < 0.02  # of 8-bit activations
    for threads in (1, 2, 3):
        set_threads(threads)
        np.testing.assert_array_equal(block(x, np.array([70], np.int32)), alone)
