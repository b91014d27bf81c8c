"""Quantised matrices dealt out to several devices, each process reading the codes of its own.

A matrix is laid out by the table that floats are laid out by (parallel/rules.py). Where its inputs
are divided, a group of them, which shares a scale, stays together: channels of the mlp are dealt
out by whole groups (`mlp_unit`), and groups that heads do not keep together are cut into smaller
ones of the same scale. What can be dealt out neither way, act-order's groups say, has its codes
divided in their own order, and each product begins with a gather of its inputs (`Deal.order`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int, UInt8

from llmjax_kernels.quant_matmul import (
    FORMATS,
    QuantFormat,
    QuantWeight,
    coded_exponent,
    from_coded,
    gguf_quant_format,
    join,
    quant_format,
)
from llmjax_kernels.quant_matmul.weight import SMALLEST_GROUP

from ..models import DecoderConfig
from ..models.weights import WeightTable
from ..parallel.rules import logical_axes, parameter_sharding
from ..quant import CodedRows, Coding, QuantisedMatrix
from ..quant.base import TABLES
from .arrays import picked
from .base import Checkpoint
from .packing import some_of

log = logging.getLogger(__name__)

ReadRows = Callable[[int, int, slice], CodedRows]
"""(start, stop, places) -> as `QuantisedMatrix.rows`, of what fills one parameter."""


class Deal(NamedTuple):
    """How a quantised matrix becomes a parameter [N, K] over several devices.

    Attributes:
        layout: of [N, K].
        format: its own, or one of smaller groups.
        rows: of each output the row of the checkpoint, -1 for zeros.
        places: of each place of codes, of which there are K, that of the checkpoint, likewise.
        order: the input at each place; None has them as they are.
    """

    layout: NamedSharding
    format: QuantFormat
    rows: Int[np.ndarray, " N"]
    places: Int[np.ndarray, " K"]
    order: Int[np.ndarray, " K"] | None

    @property
    def is_divided(self) -> bool:
        """No device has all of it."""
        return any(self.layout.spec)

    def order_of(self, places: slice) -> Int[np.ndarray, " places"] | None:
        return None if self.order is None else self.order[places]


def deal(
    path: str,
    shape: tuple[int, int],
    format: QuantFormat,
    order: Int[np.ndarray, " stored"] | None,
    sources: Mapping[str, Int[np.ndarray, " places"]],
    mesh: Mesh,
) -> Deal:
    """How the matrix of the parameter at `path` is dealt out.

    Args:
        shape: of the parameter, what was added to divide it included.
        order: of the matrix in the checkpoint.
        sources: `Partition.sources`.
    """
    (N, K), (outputs, inputs) = shape, logical_axes(path) or (None, None)
    rows = sources.get(outputs or "", np.arange(N))
    stored = sources.get(inputs or "", np.arange(K))
    if inputs is None:
        layout = parameter_sharding(path, shape, mesh)
        return Deal(layout, format, rows, stored, order)
    if order is None:
        for smaller in _of_smaller_groups(format):
            unit = unit_of(smaller)
            found = Deal(_by_units(path, shape, unit, mesh), smaller, rows, stored, None)
            if found.is_divided and _keeps_together(stored, unit):
                return found
    order = _order_after(stored, order)
    places = np.where(np.arange(K) < np.count_nonzero(stored >= 0), np.arange(K), -1)
    for smaller in _of_smaller_groups(format):
        layout = _by_units(path, shape, unit_of(smaller), mesh)
        found = Deal(layout, smaller, rows, places, order)
        if found.is_divided:
            return found
    own = None if np.array_equal(order, np.arange(K)) else order
    return Deal(_by_units(path, shape, K, mesh), format, rows, places, own)


def unit_of(format: QuantFormat) -> int:
    """Inputs that must stay together."""
    byte = 2 if format.code == "int4" else 1
    rounded = format.inputs.group if format.inputs is not None else 0
    return lcm(format.span or format.group or byte, rounded or 1)


def mlp_unit(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    table: WeightTable | None,
    quantization: str | None,
) -> int:
    """Channels of the mlp that must stay together, by the quantised matrices that take them.

    Args:
        quantization: of `FORMATS`, which floats get.
    """
    unit = unit_of(FORMATS[quantization]) if quantization else 1
    if table is None:
        return unit
    name = table["layers.{i}.mlp.down.weight"].name
    names = [name.replace("{i}", str(layer)) for layer in range(config.num_layers)]
    return lcm(unit, *(_unit_of_stored(checkpoint, name) for name in names))


def _unit_of_stored(checkpoint: Checkpoint, name: str) -> int:
    matrix = checkpoint.matrices.get(name)
    if matrix is None:
        info = checkpoint.tensors.get(name)
        format = None if info is None else gguf_quant_format(info.type_name, info.shape[1])
        return unit_of(format) if format else 1
    format, inputs = quant_format(matrix.coding, matrix.shape[1]), matrix.inputs
    rounded = inputs.group if inputs is not None else 0
    return lcm(unit_of(format) if format else 1, rounded or 1)


def dealt_out(
    read: ReadRows,
    matrix: QuantisedMatrix,
    dealing: Deal,
    static_inputs: jax.Array | None,
) -> QuantWeight:
    """The parameter's parts on the devices of this process.

    Args:
        read: the rows that fill it; all scales and minima are read, as the greatest of all decides
            how all are kept.

    Raises:
        ValueError: a scale is not finite.
    """
    coding, format = matrix.coding, dealing.format
    scales = read(0, int(dealing.rows.max(initial=-1)) + 1, slice(0, 0)).to_bytes()
    exponent = coded_exponent(scales, 0, coding, format)

    def part(rows: slice, places: slice) -> QuantWeight:
        coded = _coded_part(read, coding, dealing, rows, places)
        K, order = coded.codes.shape[1], dealing.order_of(places)
        return from_coded(coded.to_bytes(), K, coding, format, order, static_inputs, exponent)

    return _of_parts(part, dealing)


def shared_out(weight: QuantWeight, dealing: Deal) -> QuantWeight:
    """A weight that one device has, as the parts of several; each process has all of it."""
    return _of_parts(partial(_part, weight, dealing), dealing)


def say(dealings: Mapping[str, Deal]) -> None:
    """Lines of the log about those, by paths, that cost more than floats would."""
    by_inputs = {path: d for path, d in dealings.items() if any(logical_axes(path)[1:])}
    gathering = [path for path, d in by_inputs.items() if d.is_divided and d.order is not None]
    whole = [path for path, d in by_inputs.items() if not d.is_divided]
    if gathering:
        log.warning(
            "groups of inputs are spread over the devices in %d quantised matrices (%s): each "
            "product gathers them first",
            *(len(gathering), some_of(gathering)),
        )
    if whole:
        log.warning(
            "there are no whole groups of inputs for each device in %d quantised matrices (%s): "
            "each has all of them",
            *(len(whole), some_of(whole)),
        )


def _of_smaller_groups(format: QuantFormat) -> Iterator[QuantFormat]:
    """A format, and those of smaller groups in which its scales can be repeated, and of smaller
    spans."""
    yield format
    for span in range(format.span - format.group, 0, -(format.group or 1)):
        if format.span % span == 0:
            yield format._replace(span=span)
    rounded = format.inputs.group if format.inputs is not None else 0
    least = lcm(SMALLEST_GROUP, rounded or 1)
    for group in range(format.group - least, 0, -least):
        if format.group % group == 0:
            yield format._replace(group=group, span=group if format.span else 0)


def _by_units(path: str, shape: tuple[int, int], unit: int, mesh: Mesh) -> NamedSharding:
    """The layout that the rules give, inputs counted by units; whole where they are none."""
    N, K = shape
    return parameter_sharding(path, (N, 1 if K % unit else K // unit), mesh)


def _keeps_together(stored: Int[np.ndarray, " K"], unit: int) -> bool:
    """Whether each unit of places is one of the checkpoint, or of zeros."""
    units = stored.reshape(-1, unit)
    first = units[:, :1]
    same = (units == first + np.arange(unit)) & (first % unit == 0)
    return bool((same | (units < 0)).all())


def _order_after(
    stored: Int[np.ndarray, " K"], order: Int[np.ndarray, " stored"] | None
) -> Int[np.ndarray, " K"]:
    """The input at each place of the checkpoint's codes, and behind them at those of zeros.

    Args:
        stored: of each input that of the checkpoint.
        order: of the checkpoint's places.
    """
    used = np.flatnonzero(stored >= 0)
    where = np.empty(len(used), np.int64)
    where[stored[used]] = used
    return np.concatenate([where if order is None else where[order], np.flatnonzero(stored < 0)])


def _of_parts(make: Callable[[slice, slice], QuantWeight], dealing: Deal) -> QuantWeight:
    """The weight whose parts are made on the first device, then handed to their own.

    Args:
        make: (rows, places) -> part.
    """
    shape = (len(dealing.rows), len(dealing.places))
    made: dict[tuple, QuantWeight] = {}
    parts = {}
    for device, index in dealing.layout.addressable_devices_indices_map(shape).items():
        key = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        if key not in made:
            rows, places = key
            made[key] = make(slice(*rows), slice(*places))
        parts[device] = jax.device_put(made[key], device)
    return join(parts, shape, dealing.layout)


def _part(weight: QuantWeight, dealing: Deal, rows: slice, places: slice) -> QuantWeight:
    """A device's own of a weight."""
    outputs, inputs = dealing.rows[rows], dealing.places[places]
    codes, scales, units, format = weight.codes, weight.scales, weight.units, dealing.format
    if format.group:
        times = weight.format.group // format.group
        codes = codes.reshape(*codes.shape[:2], times, -1).swapaxes(1, 2)
        codes = codes.reshape(-1, *weight.codes.shape[1:2], codes.shape[-1])
        first = inputs[:: format.group]  # of each group; -1 stays -1 below
        codes = _taken(codes, first // format.group, 0)
        scales = _taken(scales, first // weight.format.group, 1)
        if units is not None:
            units = _taken(units, inputs[:: format.span] // weight.format.span, 1)
    else:
        size = 2 if format.code == "int4" else 1
        codes = _taken(codes, inputs[::size] // size, 2)
    return replace(
        weight,
        codes=_taken(codes, outputs, 1),
        scales=_taken(scales, outputs, 2),
        units=None if units is None else _taken(units, outputs, 2),
        shape=(len(outputs), len(inputs)),
        format=format,
        order=None if dealing.order is None else jnp.asarray(dealing.order_of(places), jnp.int32),
    )


def _taken(values: jax.Array, index: Int[np.ndarray, " n"], axis: int) -> jax.Array:
    """`picked` on a device."""
    beyond = np.where(index < 0, values.shape[axis], index)
    return jnp.take(values, beyond, axis, mode="fill", fill_value=0)


def _coded_part(
    read: ReadRows, coding: Coding, dealing: Deal, rows: slice, places: slice
) -> CodedRows:
    """A device's own of what a checkpoint has."""
    outputs, inputs = dealing.rows[rows], dealing.places[places]
    groups = np.zeros(1, np.int64)  # the scale of all of a row
    if each := dealing.format.group:
        groups = inputs[::each] // coding.group  # of -1 that is -1
    first, last = _ends(outputs)
    if first == last:
        numbers = np.zeros((len(outputs), len(groups)), np.float32)
        codes = np.zeros((len(outputs), len(inputs)), np.uint8)
        return CodedRows(codes, numbers, numbers if coding.minima else None)
    left, right = _ends(inputs)
    stored, outputs = read(first, last, slice(left, right)), _within(outputs, first)

    def own(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return picked(picked(values, outputs, 0), columns, 1)

    codes, scales = own(stored.codes, _within(inputs, left)), own(stored.scales, groups)
    minima = None if stored.minima is None else own(stored.minima, groups)
    if not each and (inputs < 0).any():
        codes[:, inputs < 0] = _codes_of_zero(coding, scales, minima)
    return CodedRows(codes, scales, minima)


def _codes_of_zero(
    coding: Coding, scales: Float[np.ndarray, "R 1"], minima: Float[np.ndarray, "R 1"] | None
) -> UInt8[np.ndarray, "R 1"] | int:
    """Of rows that have one scale, which zeros that are added have to share."""
    if minima is not None:
        return np.rint(-minima / np.where(scales == 0, 1, scales)).astype(np.uint8)
    return coding.zero if coding.table is None else int(np.argmin(np.abs(TABLES[coding.table])))


def _ends(index: Int[np.ndarray, " n"]) -> tuple[int, int]:
    """The range of what an index takes."""
    used = index[index >= 0]
    return (int(used.min()), int(used.max()) + 1) if len(used) else (0, 0)


def _within(index: Int[np.ndarray, " n"], first: int) -> Int[np.ndarray, " n"]:
    return np.where(index < 0, -1, index - first)
