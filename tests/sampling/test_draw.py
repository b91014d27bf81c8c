import jax
import numpy as np
import pytest

from llmjax.sampling.draw import draw, pick, uniforms
from llmjax.sampling.truncation import Scale, mass_before

EDGES = np.array([0.0, 1e-7, 0.25, 0.5, 0.999999, 1 - 2**-23, 1 - 2**-24, 1.0], np.float32)


@pytest.mark.parametrize("n", (1, 64, 1001))
def test_pick_never_gives_a_weightless_index(n):
    rng = np.random.default_rng(0)
    for share in (0.0, 0.5, 0.99):
        weight = rng.random((len(EDGES), n), np.float32)
        weight[rng.random(weight.shape) < share] = 0
        weight[:, n // 3] = 1e-35  # at least one is positive
        for row in (weight, weight[:, ::-1], weight * np.float32(1e3)):
            index = np.asarray(jax.jit(pick)(row, EDGES))
            assert np.all(row[np.arange(len(EDGES)), index] > 0)


def test_pick_inverts_the_cumulative_sum():
    weight = np.tile(np.array([1, 0, 2, 5], np.float32), (5, 1))
    u = np.array([0, 0.124, 0.126, 0.374, 0.376], np.float32)
    np.testing.assert_array_equal(jax.jit(pick)(weight, u), [0, 0, 2, 2, 3])


@pytest.mark.parametrize("V", (1, 257))
def test_a_banned_token_is_never_drawn_at_the_edges(V):
    S = len(EDGES)
    logits = np.full((S, V), -np.inf, np.float32)
    logits[:, V // 2] = -3
    u = np.stack([EDGES, EDGES[::-1]], 1)
    one = np.ones(S, np.float32)
    drawn = jax.jit(draw)(logits, Scale(-3 * one, one), 80 * one, u)
    np.testing.assert_array_equal(drawn.token_ids, V // 2)
    np.testing.assert_array_equal(drawn.gap, 0)
    np.testing.assert_array_equal(drawn.mass, 1)


def test_randomness_is_of_seed_and_position_alone():
    seed = np.array([[0, 7], [1, 7], [0, 7], [0, 8], [0, 7]], np.uint32)
    position = np.array([3, 3, 4, 3, 3], np.int32)
    run = jax.jit(uniforms)
    u = np.asarray(run(seed, position))
    np.testing.assert_array_equal(u[0], u[4])
    assert len({tuple(row) for row in u}) == 4
    np.testing.assert_array_equal(run(seed[2:3], position[2:3]), u[2:3])
    assert np.all((u >= 0) & (u < 1))
    many = run(np.tile(seed[:1], (20000, 1)), np.arange(20000, dtype=np.int32))
    np.testing.assert_allclose(many.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(np.corrcoef(many.T), np.eye(4), atol=0.03)


@pytest.mark.parametrize(("V", "sizes"), ((257, (1, 3)), (49152, (1,))))
def test_sums_do_not_depend_on_how_many_rows_there_are(V, sizes):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(16, V)).astype(np.float32) * 3
    best, one = logits.max(-1), np.ones(16, np.float32)
    u = rng.random((16, 2), np.float32)
    run = jax.jit(draw)
    together = run(logits, Scale(best, one), 80 * one, u)
    for S in sizes:
        some = run(logits[:S], Scale(best[:S], one[:S]), 80 * one[:S], u[:S])
        for alone, crowd in zip(some, together, strict=True):
            np.testing.assert_array_equal(alone, crowd[:S])
    before = jax.jit(mass_before)
    crowd = before(logits, Scale(best, one), 2 * one)
    for S in sizes:
        alone = before(logits[:S], Scale(best[:S], one[:S]), 2 * one[:S])
        np.testing.assert_array_equal(alone, crowd[:S])
