"""The tensors of a compressed-tensors layer, format by format.

    pack-quantized        weight_packed I32 [N, K * bits / 32], weight_shape; codes are bits wide,
                          one after another, with 2^(bits - 1) added; weight_zero_point likewise
                          along N. Older files leave bits over in each word where bits do not
                          divide 32.
    int-, float-, naive-  weight I8 or F8_E4M3 [N, K]; weight_zero_point I8
    nvfp4-pack-           weight_packed U8 [N, K / 2], the first input in the low half;
                          weight_scale F8_E4M3 [N, K / 16], over weight_global_scale
    mxfp4-pack-, mxfp8-   the same with exponents as scales [N, K / 32]

All have `weight_scale`, whose shape is that of the strategy. Inputs with static scales have
`input_scale`, `input_zero_point` or, of NVFP4, `input_global_scale`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import CheckpointFormatError, UnsupportedModelError
from ..base import FP8_MOST, Coding, Inputs, QuantisedMatrix, Tensor, Tensors
from ..blocks import (
    E8M0_TYPES,
    BlockMatrix,
    Grid,
    bytes_of,
    nibbles_of,
    powers_of_two,
    require_grid,
    require_scalar,
)
from ..integers import unpack_apart, unpack_some, widened
from ..layers import order_of, require_groups, require_setting, require_tensor
from .schemes import Args, Scheme

_PARTS = (
    "weight",
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)


def read_matrix(tensors: Tensors, layer: str, scheme: Scheme) -> QuantisedMatrix:
    """The matrix of a layer; reads no more than its shape and what is static of its inputs.

    Raises:
        CheckpointFormatError: a tensor is missing, or has a wrong shape or type.
        UnsupportedModelError: the scheme asks for what is not implemented.
    """
    matrix = _READERS[scheme.format](tensors, layer, scheme.weights)
    inputs = _inputs(tensors, layer, scheme.inputs, matrix.shape[1])
    if matrix.order is not None and inputs is not None:
        raise UnsupportedModelError(
            f"layer {layer}: weights in the order of activations whose inputs are quantised too "
            "are not implemented"
        )
    names = tuple(n for n in (f"{layer}.{part}" for part in _PARTS) if n in tensors)
    return replace(matrix, inputs=inputs, tensors=names)


def _packed(tensors: Tensors, layer: str, args: Args) -> BlockMatrix:
    require_setting(f"{args.where}.type", args.kind, ("int",))
    stored = require_tensor(tensors, layer, "weight_shape", (2,), ("I64", "I32")).read()
    shape = N, K = int(stored[0]), int(stored[1])
    if min(shape) < 1:
        raise CheckpointFormatError(f"layer {layer}: weight_shape says {list(shape)}")
    packed = require_tensor(tensors, layer, "weight_packed", (N, None), ("I32",))
    unpack = _unpacking(layer, packed, args.bits, K)
    scales = _grid(tensors, layer, "weight_scale", args, shape)
    zeros = None
    if not args.symmetric:
        zeros = _packed_zeros(tensors, layer, args.bits, scales, N, unpack)
    coding = Coding(
        f"compressed-tensors int{args.bits}",
        args.bits,
        scales.group,
        zero=0 if zeros else 2 ** (args.bits - 1),
        minima=zeros is not None,
    )

    unit, words = (32, args.bits) if unpack is unpack_some else (32 // args.bits, 1)

    def codes(start: int, stop: int, places: slice) -> np.ndarray:
        around, inner = widened(places, unit, K)
        columns = slice(around.start // unit * words, -(-around.stop * words // unit))
        stored = packed.part(start, stop, columns)
        return unpack(stored, args.bits, around.stop - around.start)[:, inner]

    return BlockMatrix(coding, shape, codes, scales, zeros, _order(tensors, layer, args, K))


Unpacking = Callable[[np.ndarray, int, int], np.ndarray]
"""(words, bits, number of codes) -> codes."""


def _unpacking(layer: str, packed: Tensor, bits: int, K: int) -> Unpacking:
    words, dense, apart = packed.shape[1], -(-K * bits // 32), -(-K // (32 // bits))
    if words not in (dense, apart):
        raise CheckpointFormatError(
            f"layer {layer}: weight_packed has {words} words a row, expected {dense} "
            f"for {K} codes of {bits} bits"
        )
    return unpack_some if words == dense else unpack_apart


def _packed_zeros(
    tensors: Tensors, layer: str, bits: int, scales: Grid, N: int, unpack: Unpacking
) -> Grid:
    groups = -(-scales.K // scales.block[1])
    if scales.block[0] != 1:
        raise UnsupportedModelError(
            f"layer {layer}: packed zero points of a whole matrix are not implemented"
        )
    words = -(-N * bits // 32) if unpack is unpack_some else -(-N // (32 // bits))
    found = require_tensor(tensors, layer, "weight_zero_point", (words, groups), ("I32",))

    @functools.cache
    def all_zeros() -> np.ndarray:
        return unpack(np.ascontiguousarray(found.read().T), bits, N).T.astype(np.float32)

    return Grid(lambda start, stop: all_zeros()[start:stop], scales.block, scales.K)


def _order(tensors: Tensors, layer: str, args: Args, K: int) -> np.ndarray | None:
    if not args.ordered:
        return None
    groups = require_tensor(tensors, layer, "weight_g_idx", (K,), ("I32", "I64")).read()
    return None if (groups == -1).all() else order_of(layer, groups, args.group)


def _plain(tensors: Tensors, layer: str, args: Args) -> BlockMatrix:
    """One code a byte."""
    floats = args.kind == "float"
    if floats:
        require_setting(f"{args.where}.num_bits", args.bits, (8,))
        require_setting(f"{args.where}.symmetric", args.symmetric, (True,))
    weight = require_tensor(
        tensors, layer, "weight", (None, None), ("F8_E4M3" if floats else "I8",)
    )
    shape = (weight.shape[0], weight.shape[1])
    scales, zeros = _grid(tensors, layer, "weight_scale", args, shape), None
    if not args.symmetric:
        zeros = _grid(
            tensors,
            layer,
            "weight_zero_point",
            args,
            shape,
            ("I8",),
            lambda z: z.astype(np.float32) + 128,
        )
    name = "compressed-tensors fp8" if floats else f"compressed-tensors int{args.bits}"
    coding = Coding(
        name,
        8,
        scales.group,
        zero=0 if floats or zeros else 128,
        minima=zeros is not None,
        table="e4m3" if floats else None,
    )
    codes = bytes_of(weight, flip=0 if floats else 128)
    return BlockMatrix(coding, shape, codes, scales, zeros, _order(tensors, layer, args, shape[1]))


def _nvfp4(tensors: Tensors, layer: str, args: Args) -> BlockMatrix:
    whole = require_scalar(tensors, layer, "weight_global_scale")
    if not whole > 0:
        raise CheckpointFormatError(f"layer {layer}: weight_global_scale is {whole}")

    def convert(scales: np.ndarray) -> np.ndarray:
        return scales.astype(np.float32) / np.float32(whole)

    return _fp4(tensors, layer, args, 16, ("F8_E4M3",), convert)


def _mxfp4(tensors: Tensors, layer: str, args: Args) -> BlockMatrix:
    return _fp4(tensors, layer, args, 32, E8M0_TYPES, powers_of_two)


def _fp4(
    tensors: Tensors,
    layer: str,
    args: Args,
    group: int,
    types: tuple[str, ...],
    convert: Callable[[np.ndarray], np.ndarray],
) -> BlockMatrix:
    require_setting(f"{args.where}.type", args.kind, ("float",))
    require_setting(f"{args.where}.num_bits", args.bits, (4,))
    require_setting(f"{args.where}.group_size", args.group, (group,))
    packed = require_tensor(tensors, layer, "weight_packed", (None, None), ("U8",))
    shape = (packed.shape[0], packed.shape[1] * 2)
    scales = _grid(tensors, layer, "weight_scale", args, shape, types, convert)
    name = "compressed-tensors " + ("nvfp4" if group == 16 else "mxfp4")
    coding = Coding(name, 4, scales.group, table="e2m1")
    return BlockMatrix(coding, shape, nibbles_of(packed), scales)


def _mxfp8(tensors: Tensors, layer: str, args: Args) -> BlockMatrix:
    require_setting(f"{args.where}.group_size", args.group, (32,))
    weight = require_tensor(tensors, layer, "weight", (None, None), ("F8_E4M3",))
    shape = (weight.shape[0], weight.shape[1])
    scales = _grid(tensors, layer, "weight_scale", args, shape, E8M0_TYPES, powers_of_two)
    coding = Coding("compressed-tensors mxfp8", 8, scales.group, table="e4m3")
    return BlockMatrix(coding, shape, bytes_of(weight), scales)


_READERS = {
    "pack-quantized": _packed,
    "int-quantized": _plain,
    "float-quantized": _plain,
    "naive-quantized": _plain,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "mxfp8-quantized": _mxfp8,
}


def _grid(
    tensors: Tensors, layer: str, part: str, args: Args, shape: tuple[int, int], *rest: Any
) -> Grid:
    """The numbers that a strategy has for each of its blocks."""
    N, K = shape
    if args.strategy in ("group", "tensor_group") and args.group < K:
        require_groups(layer, K, args.group)
    require_setting(
        f"{args.where}.strategy",
        args.strategy,
        ("tensor", "channel", "group", "tensor_group", "block"),
    )
    block = {
        "tensor": (N, K),
        "channel": (1, K),
        "group": (1, args.group),
        "tensor_group": (1, args.group),
        "block": args.block,
    }[args.strategy]
    return require_grid(tensors, layer, part, shape, block, *rest)


_INPUT_CODES = {
    ("int", 8): "int8",
    ("int", 4): "int4",
    ("float", 8): "fp8_e4m3",
    ("float", 4): "e2m1",
}


def _inputs(tensors: Tensors, layer: str, args: Args | None, K: int) -> Inputs | None:
    if args is None:
        return None
    require_setting(f"{args.where}.num_bits", (args.kind, args.bits), tuple(_INPUT_CODES))
    if args.kind == "float":
        require_setting(f"{args.where}.symmetric", args.symmetric, (True,))
    code = _INPUT_CODES[args.kind, args.bits]
    # The peer divides the range of integers evenly, so that the greatest falls between codes.
    reach = (2**args.bits - 1) / 2 if args.kind == "int" else FP8_MOST
    if args.dynamic is False:
        require_setting(f"static {args.where}.strategy", args.strategy, ("tensor",))
        scale, zero = require_scalar(tensors, layer, "input_scale"), 0.0
        if not args.symmetric:
            zero = require_scalar(tensors, layer, "input_zero_point", ("I8", "I32"))
        return Inputs(code, scale=scale, zero=zero, symmetric=args.symmetric)
    if args.dynamic == "local":
        require_groups(layer, K, args.group)
        factor = require_scalar(tensors, layer, "input_global_scale")
        return Inputs(code, args.group, scale=factor, scales="e4m3")
    # A scale of all that comes at once would have a token depend on who else is in the batch:
    # each has its own instead, which is finer.
    require_setting(f"dynamic {args.where}.strategy", args.strategy, ("token", "tensor", "group"))
    if args.strategy == "group":
        require_groups(layer, K, args.group)
    return Inputs(
        code,
        args.group if args.strategy == "group" else 0,
        symmetric=args.symmetric,
        reach=reach,
        scales="e8m0" if args.of_powers else "float32",
    )
