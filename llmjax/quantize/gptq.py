"""GPTQ: weights rounded input by input, each error made good by the inputs still to come.

Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323; the options are GPTQModel's.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import ConfigError
from .config import QuantizeConfig
from .formats import int_format
from .grid import Grid, IntCodes
from .layer import Layer, Place

Ordering = Literal["stored", "grouped", "energy", "static"]
"""Of inputs: as stored; by energy, within groups of neighbours and of these (GPTQModel's
"act_group_aware"); by energy, groups being of neighbours in that order; or groups as stored."""

BLOCK = 128
"""Inputs after which errors reach those outside of their block."""
_MOST_DAMPING = 1.0


class _Solution(NamedTuple):
    codes: Float[Array, "N K"]
    scales: Float[Array, "N G"]
    zeros: Float[Array, "N G"]
    groups: Int[Array, " K"]
    is_finite: Bool[Array, ""]


def quantise(layer: Layer, config: QuantizeConfig) -> None:
    """Place after place: what a place is given has gone through those before, as they now are."""
    format = int_format(config, layer.dtype)
    for place in layer.places:
        targets = layer.targets_at(place)
        weights = [layer.weight(target) for target in targets]
        for target, weight in zip(targets, weights, strict=True):
            group = format.group_of(target, weight.shape)
        [inputs] = layer.inputs([place], gram=True)
        # Rows are rounded each by itself: matrices of one input are one to the solver.
        whole = solve(np.concatenate(weights), inputs.gram, format.grid, group, config, place)
        ends = np.cumsum([len(weight) for weight in weights])
        for target, weight, end in zip(targets, weights, ends, strict=True):
            layer.put(target, format.coded(whole.rows(end - len(weight), end)))


def solve(
    weight: Float[np.ndarray, "N K"],
    gram: Float[Array, "K K"],
    grid: Grid,
    group: int,
    config: QuantizeConfig,
    place: Place,
) -> IntCodes:
    """The codes of the matrices of a place, one above the other.

    Args:
        gram: X^T X, up to a factor.
        group: inputs that share a scale.
        place: whose they are, for messages.

    Raises:
        ConfigError: the Hessian is not positive definite, whatever is added to its diagonal.
    """
    damp = config.damp
    assert damp is not None
    while damp <= _MOST_DAMPING:
        solution = _solve(
            jnp.asarray(weight),
            gram,
            damp,
            grid=grid,
            group=group,
            ordering=_ordering(config),
        )
        if solution.is_finite:
            codes, scales, zeros, groups, _ = map(np.asarray, solution)
            return IntCodes(grid, codes.astype(np.uint8), scales, zeros.astype(np.uint8), groups)
        damp *= 4
    raise ConfigError(
        f"damp is {config.damp}, and {', '.join(place.linears)} of a layer have a Hessian that is "
        "not positive definite; "
        "allowed: a greater one, or more calibration text"
    )


def _ordering(config: QuantizeConfig) -> Ordering:
    if config.desc_act:
        return "static" if config.static_groups else "energy"
    return "grouped" if config.act_group_aware else "stored"


@partial(jax.jit, static_argnames=("grid", "group", "ordering"))
def _solve(
    weight: Float[Array, "N K"],
    gram: Float[Array, "K K"],
    damp: Float[Array, ""],
    *,
    grid: Grid,
    group: int,
    ordering: Ordering,
) -> _Solution:
    K = weight.shape[1]
    energy = jnp.diagonal(gram)
    order = _order(energy, group, ordering)
    # Inputs that are always zero: any weight will do, and zero is exact.
    dead = energy == 0
    weight = jnp.where(dead, 0, weight)
    hessian = gram + jnp.diag(jnp.where(dead, 1, 0) + damp * jnp.mean(energy))
    factor = inverse_factor(hessian[order][:, order])
    rows, groups = weight.T[order], jnp.arange(K) // group
    if ordering == "static":
        scales, zeros = grid.fit(*_ends(weight.T.reshape(-1, group, len(weight))))
        groups = groups[order]
        codes = _fixed(rows, factor, scales[groups], zeros[groups], grid)
    else:
        codes, scales, zeros = _in_groups(rows, factor, group, grid)
    if ordering == "grouped":
        # Groups were gone through in another order than they are stored in.
        stored = jnp.argsort(order[::group] // group)
        groups, scales, zeros = order // group, scales[stored], zeros[stored]
    place = jnp.argsort(order)
    finite = jnp.isfinite(factor).all() & jnp.isfinite(weight).all()
    return _Solution(codes[place].T, scales.T, zeros.T, groups[place].astype(jnp.int32), finite)


def _order(energy: Float[Array, " K"], group: int, ordering: Ordering) -> Int[Array, " K"]:
    """Which input is rounded first, and so on."""
    if ordering == "stored":
        return jnp.arange(len(energy))
    if ordering != "grouped":
        return jnp.argsort(-energy)
    by_group = energy.reshape(-1, group)
    first = jnp.argsort(-jnp.max(by_group, axis=1))
    within = jnp.argsort(-by_group, axis=1)
    return (first[:, None] * group + within[first]).reshape(-1)


def inverse_factor(hessian: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """The upper triangular U with U^T U = H^-1.

    H = R R^T with an upper triangular R, of the Cholesky factor of H back to front, and U is
    R's inverse: H itself is never inverted.
    """
    K = len(hessian)
    backwards = jnp.linalg.cholesky(hessian[::-1, ::-1])
    return jax.scipy.linalg.solve_triangular(backwards[::-1, ::-1], jnp.eye(K), lower=False)


def _ends(rows: Float[Array, "... g N"]) -> tuple[Float[Array, "... N"], Float[Array, "... N"]]:
    return jnp.min(rows, axis=-2), jnp.max(rows, axis=-2)


def _fixed(
    rows: Float[Array, "K N"],
    factor: Float[Array, "K K"],
    scales: Float[Array, "K N"],
    zeros: Float[Array, "K N"],
    grid: Grid,
) -> Float[Array, "K N"]:
    """Codes where every input's scale is known beforehand."""
    K = len(rows)
    block = gcd(K, BLOCK)

    def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, codes = state
        s, z = (jax.lax.dynamic_slice_in_dim(a, i * block, block) for a in (scales, zeros))
        return _round_block(rows, codes, factor, i * block, s, z, grid)

    return jax.lax.fori_loop(0, K // block, step, (rows, jnp.zeros_like(rows)))[1]


def _in_groups(
    rows: Float[Array, "K N"], factor: Float[Array, "K K"], group: int, grid: Grid
) -> tuple[Float[Array, "K N"], Float[Array, "G N"], Float[Array, "G N"]]:
    """Codes, scales and zeros: a group's scale is of its weights as they are when it comes to
    them, with the errors of all groups before."""
    K, N = rows.shape
    block = gcd(group, BLOCK)

    def step(g: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        rows, codes, scales, zeros = state
        scale, zero = grid.fit(*_ends(jax.lax.dynamic_slice_in_dim(rows, g * group, group)))
        s, z = (jnp.broadcast_to(a, (block, N)) for a in (scale, zero))

        def inner(b: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            return _round_block(*state, factor, g * group + b * block, s, z, grid)

        rows, codes = jax.lax.fori_loop(0, group // block, inner, (rows, codes))
        return rows, codes, scales.at[g].set(scale), zeros.at[g].set(zero)

    empty = jnp.zeros((K // group, N))
    state = (rows, jnp.zeros_like(rows), empty, empty)
    return jax.lax.fori_loop(0, K // group, step, state)[1:]


def _round_block(
    rows: Float[Array, "K N"],
    codes: Float[Array, "K N"],
    factor: Float[Array, "K K"],
    start: Array,
    scales: Float[Array, "B N"],
    zeros: Float[Array, "B N"],
    grid: Grid,
) -> tuple[Float[Array, "K N"], Float[Array, "K N"]]:
    """Rounds inputs [start : start + B], and takes their errors off all that follow."""
    B, N = scales.shape
    across = jax.lax.dynamic_slice_in_dim(factor, start, B)
    within = jax.lax.dynamic_slice_in_dim(across, start, B, axis=1)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        block, coded, errors = state
        code = grid.codes(block[i], scales[i], zeros[i])
        error = (block[i] - (code - zeros[i]) * scales[i]) / within[i, i]
        return block - jnp.outer(within[i], error), coded.at[i].set(code), errors.at[i].set(error)

    block = jax.lax.dynamic_slice_in_dim(rows, start, B)
    none = jnp.zeros((B, N))
    _, coded, errors = jax.lax.fori_loop(0, B, step, (block, none, none))
    rows = rows - jnp.matmul(across.T, errors, precision="float32")
    return rows, jax.lax.dynamic_update_slice_in_dim(codes, coded, start, axis=0)
