"""Codes of checkpoints survive packing, whatever they mean and in whatever order."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from coded_weights import CODED, group_size, random_codes
from random_weights import order_of, unpacked

from llmjax.quant import Coding
from llmjax.quant.base import TABLES
from llmjax_kernels import packed
from llmjax_kernels.code_tables import CODE_TABLES
from llmjax_kernels.native.blocks import Projection, linear
from llmjax_kernels.packed import Arena, order_nbytes, pack_coded
from llmjax_kernels.weight_format import WeightFormat, coded_format

HALF = 2.0**-11
"""The relative error of rounding to float16."""


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("N", [1, 15, 16, 17, 83])
@pytest.mark.parametrize("name", CODED)
def test_unpacks_to_what_the_codes_say(name, N, blocks):
    K = blocks * group_size(name)
    weight = random_codes(name, N, K, np.random.default_rng(N))
    stored = weight.pack()
    assert stored.shape == (N, K)
    codes = np.asarray(stored.codes()).swapaxes(1, 2).reshape(-1, K)[:N]
    np.testing.assert_array_equal(codes, weight.rows.codes)
    error = np.abs(np.asarray(unpacked(stored)) - weight.values)
    # A scale far below the greatest becomes subnormal: no finer than 2^-24 of the unit.
    assert (error <= 2 * HALF * weight.magnitude + 2.0 ** (stored.exponent - 25) * 255).all()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 6e-8, 1000.0])
def test_scales_of_any_size(name, scale):
    weight = random_codes(name, 17, 384, np.random.default_rng(0), scale)
    error = np.abs(np.asarray(unpacked(weight.pack())) - weight.values)
    assert (error <= 4 * HALF * weight.magnitude).all()


@pytest.mark.parametrize("name", CODED)
def test_no_rows_and_few_at_a_time(name, monkeypatch):
    weight = random_codes(name, 83, 384, np.random.default_rng(0))
    nothing = pack_coded(weight.rows.to_bytes()[:0], 384, weight.coding, weight.order)
    assert unpacked(nothing).shape == (0, 384)
    expected = unpacked(weight.pack())
    monkeypatch.setattr(packed, "CODED_WEIGHTS", 1)
    np.testing.assert_array_equal(unpacked(weight.pack()), expected)


def test_weights_of_one_order_share_it():
    rng = np.random.default_rng(0)
    names = ("4 bits in order", "8 bits in order", "4 bits with minima in order")
    one, same, other = (random_codes(name, 33, 96, rng) for name in names)
    same = replace(same, order=one.order)
    sizes = [coded_format(w.coding, 96).nbytes(33, 96) for w in (one, same, other)]
    arena = Arena(sum(sizes) + 2 * order_nbytes(96))
    made = {
        name: arena.pack_coded(w.rows.to_bytes(), 96, w.coding, w.order)
        for name, w in zip(names, (one, same, other), strict=True)
    }
    first, second, third = made.values()
    assert first.order == second.order != third.order
    made = arena.to_device(made)
    for name, weight in zip(names, (one, same, other), strict=True):
        np.testing.assert_array_equal(order_of(made[name]), weight.order)
        np.testing.assert_array_equal(unpacked(made[name]), unpacked(weight.pack()))


def test_an_order_changes_nothing_but_places():
    rng = np.random.default_rng(0)
    weight = random_codes("4 bits in order", 33, 256, rng)
    x = rng.standard_normal((40, 256)).astype(np.float32)
    product = jax.jit(lambda x, w: linear(x, Projection(w), np.array([40], np.int32)))
    plain = replace(weight, order=None).pack()
    np.testing.assert_array_equal(product(x, weight.pack()), product(x[:, weight.order], plain))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_refused(value):
    weight = random_codes("4 bits with minima", 17, 384, np.random.default_rng(0))
    weight.rows.minima[16, 1] = value
    with pytest.raises(ValueError, match="scales that are not finite"):
        weight.pack()


@pytest.mark.parametrize("order", [np.zeros(64, int), np.arange(1, 65), np.arange(63)])
def test_an_order_that_is_none_is_refused(order):
    weight = random_codes("4 bits in order", 17, 64, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no permutation of 64"):
        replace(weight, order=order).pack()


def test_how_codes_are_kept():
    assert coded_format(Coding("", 4, 128, zero=8), 256) == WeightFormat(4, 32, 8)
    assert coded_format(Coding("", 8, 256, zero=7), 256) == WeightFormat(8, 32, 128, True)
    for coding, K in (
        (Coding("", 4, 8), 64),  # groups that no kernel has
        (Coding("", 8, 16), 64),
        (Coding("", 4, 20), 100),
        (Coding("", 8, 32, table="e4m3"), 64),
    ):
        assert coded_format(coding, K) is None


@pytest.mark.parametrize(("name", "bound"), [("e2m1", 0), ("nf4", 0.0029), ("fp4", 0.0032)])
def test_tables_are_near_the_numbers_of_checkpoints(name, bound):
    table = CODE_TABLES[name]
    assert np.abs(np.array(table.integers) * table.unit - TABLES[name]).max() <= bound
