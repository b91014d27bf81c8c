"""GPTQ's solver against the algorithm done the long way, and what it is for."""

from __future__ import annotations

import numpy as np
import plain_references as references
import pytest

from llmjax.errors import ConfigError
from llmjax.quantize import QuantizeConfig
from llmjax.quantize.gptq import inverse_factor, solve
from llmjax.quantize.grid import Grid
from llmjax.quantize.layer import Place

PLACE = Place(("mlp.down",), "mlp.up", np.arange(64))


ALIKE = 1 - 1 / 16
"""Of codes: the greatest weight of a symmetric group of 16 lies between two; to which it falls is
up to the last bits."""


def solved(weight, x, *, bits=4, group=16, symmetric=True, **settings):
    options = {"bits": bits, "group_size": group, "symmetric": symmetric} | settings
    if not settings:
        options["act_group_aware"] = False
    config = QuantizeConfig("gptq", calibration="unused.txt", **options)
    grid = Grid(bits, symmetric, np.dtype(np.float32))
    gram = (x.T @ x / len(x)).astype(np.float32)
    return solve(weight, gram, grid, group, config, PLACE), gram


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 64), (8, 32), (3, 8), (2, 32)])
def test_agrees_with_the_long_way(bits, group, symmetric):
    weight, x = references.matrices(bits)
    found, gram = solved(weight, x, bits=bits, group=group, symmetric=symmetric)
    wanted, codes = references.gptq(weight, gram, bits, group, symmetric, 0.05)
    assert np.mean(found.codes == codes) > ALIKE
    error = references.output_error(weight, wanted, x)
    assert references.output_error(weight, found.values, x) == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("static", [True, False])
def test_order_of_energy(static):
    weight, x = references.matrices(1)
    found, gram = solved(weight, x, desc_act=True, static_groups=static)
    order = np.argsort(-np.diag(gram), kind="stable")
    wanted, codes = references.gptq(weight, gram, 4, 16, True, 0.05, order, static)
    groups = np.arange(64) // 16
    if not static:
        groups[order] = np.arange(64) // 16
    np.testing.assert_array_equal(found.groups, groups)
    assert np.mean(found.codes == codes) > ALIKE
    error = references.output_error(weight, wanted, x)
    assert references.output_error(weight, found.values, x) == pytest.approx(error, rel=0.03)


def test_order_of_energy_within_groups():
    weight, x = references.matrices(6)
    found, gram = solved(weight, x, symmetric=False, act_group_aware=True)
    energy = np.diag(gram).reshape(4, 16)
    order = [16 * g + k for g in np.argsort(-energy.max(axis=1)) for k in np.argsort(-energy[g])]
    wanted, codes = references.gptq(weight, gram, 4, 16, False, 0.05, np.array(order))
    np.testing.assert_array_equal(found.groups, np.arange(64) // 16)
    assert np.mean(found.codes == codes) > ALIKE
    error = references.output_error(weight, wanted, x)
    assert references.output_error(weight, found.values, x) == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize(
    "settings",
    [{}, {"act_group_aware": True}, {"desc_act": True}, {"symmetric": False}, {"group": 64}],
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_outputs_are_nearer_than_by_rounding_to_nearest(bits, settings):
    weight, x = references.matrices(2)
    found, _ = solved(weight, x, bits=bits, **settings)
    plain = references.nearest(
        weight, bits, settings.get("group", 16), settings.get("symmetric", True)
    )
    ours = references.output_error(weight, found.values, x)
    assert ours < references.output_error(weight, plain, x)


def test_factor_of_the_inverse():
    _, x = references.matrices(3)
    hessian = (x.T @ x / len(x) + np.eye(64)).astype(np.float32)
    factor = np.asarray(inverse_factor(hessian), np.float64)
    np.testing.assert_array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ hessian, np.eye(64), atol=2e-3)


def test_inputs_that_are_always_zero_get_the_code_of_zero():
    weight, x = references.matrices(4)
    x[:, [3, 40]] = 0
    found, _ = solved(weight, x)
    assert not found.values[:, [3, 40]].any()
    assert found.values[:, 4].any()


def test_a_hessian_that_is_none_names_the_layer():
    weight, x = references.matrices(5)
    x[0, 0] = np.nan
    with pytest.raises(ConfigError, match=r"mlp\.down"):
        solved(weight, x)
