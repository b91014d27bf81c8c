"""Products with packed weights: right within the 8-bit activations' error, whoever is near."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from random_weights import FLOATS, FORMATS, block_size, order_of, random_weight, unpacked

from llmjax_kernels.native.blocks import Projection, embed, linear

ROWS = (1, 2, 3, 5, 8, 9, 17, 65, 130)
SHAPES = [(N, blocks) for N in (1, 15, 16, 17) for blocks in (1, 5)] + [(83, 1)]
SHAPES = [*SHAPES, pytest.param(83, 5, marks=pytest.mark.every_isa)]
ULP = 2.0**-24


def activations(rows: int, K: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of very different sizes, one of them zero."""
    sizes = 10.0 ** rng.uniform(-3, 3, (rows, 1))
    sizes[min(2, rows - 1)] = 0
    return (rng.standard_normal((rows, K)) * sizes).astype(np.float32)


def error_bound(
    x: np.ndarray,
    weight: np.ndarray,
    magnitude: np.ndarray,
    quantised: bool,
    order: np.ndarray | None = None,
) -> np.ndarray:
    """How far a product may be from the exact one.

    An activation is off by half a step of its group of 32, whose largest is 127 steps. Each
    of the float sums, of which there is one a group or one a value, and what they are scaled
    by, round a few times.

    Args:
        order: of the inputs as they are grouped, if it is another.
    """
    M, K = x.shape
    bound = 4 * (K // 32 + 4 if quantised else K + 4) * ULP * (np.abs(x) @ magnitude.T)
    if quantised:
        if order is not None:
            x, weight = x[:, order], weight[:, order]
        steps = np.abs(x).reshape(M, K // 32, 32).max(2) / 127
        bound += 0.50001 * np.repeat(steps, 32, axis=1) @ np.abs(weight).T
    return bound


@pytest.mark.parametrize(("N", "blocks"), SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_is_near_the_exact_product(format, N, blocks, set_threads):
    rng = np.random.default_rng(N)
    K = blocks * max(block_size(format), 32)
    weight, magnitude = random_weight(format, N, K, rng)
    bias = rng.standard_normal(N).astype(np.float32) if blocks == 1 else None
    x = activations(max(ROWS), K, rng)
    values = np.asarray(unpacked(weight), np.float64)
    exact = x.astype(np.float64) @ values.T + (0 if bias is None else bias)
    bound = error_bound(x, values, magnitude, format not in FLOATS, order_of(weight))
    bound += 0 if bias is None else ULP * (np.abs(exact) + np.abs(bias))
    product = jax.jit(lambda x, rows: linear(x, Projection(weight, bias), rows))

    def first(x: np.ndarray, rows: int) -> np.ndarray:
        return np.asarray(product(x, np.array([rows])))

    set_threads(1)
    alone = np.concatenate([first(row[None], 1) for row in x])
    assert (np.abs(alone - exact) <= bound).all()
    for threads in (1, 2, 3):
        set_threads(threads)
        for rows in ROWS:
            # bit for bit, and zeros behind
            expected = np.where(np.arange(len(x))[:, None] < rows, alone, 0)
            np.testing.assert_array_equal(first(x, rows), expected)
        np.testing.assert_array_equal(first(x[::-1], len(x)), alone[::-1])


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("K", [1, 7, 33])
def test_float_weights_of_any_width(format, K):
    rng = np.random.default_rng(K)
    weight, magnitude = random_weight(format, 19, K, rng)
    x = activations(5, K, rng)
    values = np.asarray(unpacked(weight), np.float64)
    out = np.asarray(linear(x, Projection(weight), np.array([5])))
    assert (np.abs(out - x @ values.T) <= error_bound(x, values, magnitude, False)).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("format", ["Q4_1", "Q6_K", "IQ4_NL", "8 bits with minima", "bfloat16"])
def test_what_is_not_finite_stays_so_and_in_its_row(format):
    rng = np.random.default_rng(0)
    weight, _ = random_weight(format, 17, 256, rng)
    x = activations(5, 256, rng)
    product = jax.jit(lambda x: linear(x, Projection(weight), np.array([5], np.int32)))
    expected = np.asarray(product(x))
    for value in (np.nan, np.inf, -np.inf):
        for place in (0, 15, 16, 31, 255):
            broken = x.copy()
            broken[3, place] = value
            found = np.asarray(product(broken))
            assert not np.isfinite(found[3]).any()
            np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(expected, 3, 0))


@pytest.mark.parametrize("format", FORMATS)
def test_vanishing_activations_give_vanishing_products(format):
    weight, _ = random_weight(format, 17, 768, np.random.default_rng(0))
    x = np.full((1, 768), 1e-39, np.float32) * np.resize([1, -1, 1], 768)
    out = np.asarray(linear(x.astype(np.float32), Projection(weight), np.array([1], np.int32)))
    assert (np.abs(out) < 1e-30).all()


def test_no_rows_at_all():
    weight, _ = random_weight("Q4_0", 17, 32, np.random.default_rng(0))
    out = linear(np.ones((3, 32), np.float32), Projection(weight), np.array([0]))
    assert not np.asarray(out).any()


@pytest.mark.every_isa
@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_are_the_unpacked_ones(format):
    weight, _ = random_weight(format, 83, 768, np.random.default_rng(0))
    tokens = np.array([0, 82, 15, 16, 17, 0, *range(83)], np.int32)
    np.testing.assert_array_equal(embed(tokens, weight), np.asarray(unpacked(weight))[tokens])


def test_embedding_never_reads_outside_the_table():
    weight, _ = random_weight("Q8_0", 19, 32, np.random.default_rng(0))
    rows = np.asarray(unpacked(weight))
    tokens = np.array([-1, -(2**31), 19, 2**31 - 1], np.int32)
    np.testing.assert_array_equal(embed(tokens, weight), rows[[0, 0, 18, 18]])


def test_threads_beyond_the_cores_are_no_harm(set_threads):
    rng = np.random.default_rng(0)
    weight, _ = random_weight("Q4_K", 513, 256, rng)
    x = activations(33, 256, rng)
    expected = np.asarray(linear(x, Projection(weight), np.array([33])))
    set_threads(64)
    for _ in range(20):
        np.testing.assert_array_equal(linear(x, Projection(weight), np.array([33])), expected)
