"""The Triton kernels of products with quantised weights; only jax_triton.py imports them.

A program computes a tile of the transposed result, W x^T: its factor from the weights may then
come from registers, where it has just been dequantised, also on Hopper, whose matrix units take
only the other one from shared memory alone; and the few rows of a decode are the side that may
be as short as 16.

Sizes of weights are constants: what they are multiples of decides how wide loads are. Loads are
masked here, at every edge: what lies beyond is another array's, or NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT4 = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)


@triton.jit
def dequantised(
    x,
    codes,
    scales,
    units,
    M,
    splits,
    factor,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    MINIMA: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    CODE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """x times codes that are dequantised in registers: program (tile of M, tile of N, split).

    Args:
        units: read where there are spans.
        factor: multiplies the result.
        out: [splits, M, N], to be added up.
        GROUP: inputs of a scale, GROUP_BYTES of a row.
        BLOCK_K: of one group.
        GROUPED: whether there are several groups; else the result is scaled.
        SPAN: inputs of a unit, by which scales are multiplied; 0 has none.
        ZERO: the code of 0.
        DTYPE: of x, and of weights as they are multiplied.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    blocks = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(blocks, splits)
    channel = tl.arange(0, BLOCK_K)
    # A byte is two inputs of int4.
    LANES: tl.constexpr = BLOCK_K // 2 if CODE == INT4 else BLOCK_K
    lane = tl.arange(0, LANES)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(split * share, tl.minimum(split * share + share, blocks)):
        first = block * BLOCK_K
        of_group = first // GROUP
        byte = (first - of_group * GROUP) * LANES // BLOCK_K + lane
        rows = codes + (of_group.to(tl.int64) * N + n)[:, None] * GROUP_BYTES
        there = (n < N)[:, None] & (byte < GROUP_BYTES)[None, :]
        weights = _numbers(tl.load(rows + byte[None, :], mask=there, other=0), CODE, ZERO)
        if GROUPED:
            place = scales + of_group * N + n
            scale = tl.load(place, mask=n < N, other=0).to(tl.float32)
            if SPAN > 0:
                unit = units + first // SPAN * N + n
                scale *= tl.load(unit, mask=n < N, other=0.0).to(tl.float32)
            weights *= scale[:, None]
            if MINIMA:
                below = tl.load(place + tl.cdiv(K, GROUP) * N, mask=n < N, other=0)
                minimum = below.to(tl.float32)
                if SPAN > 0:
                    below = tl.load(unit + tl.cdiv(K, SPAN) * N, mask=n < N, other=0.0)
                    minimum *= below.to(tl.float32)
                weights += minimum[:, None]
        there = (m < M)[:, None] & (first + channel < K)[None, :]
        inputs = tl.load(x + m[:, None] * K + first + channel[None, :], mask=there, other=0.0)
        acc = tl.dot(weights.to(DTYPE), tl.trans(inputs), acc, input_precision="ieee")
    acc *= factor
    if not GROUPED:
        acc *= tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    _store(out, acc, split, m, n, M, N)


@triton.jit
def _numbers(codes, CODE: tl.constexpr, ZERO: tl.constexpr):
    """What codes stand for, in float32; by additions, as conversions of integers are slow.

    Args:
        ZERO: of int4, the code of 0.
    """
    if CODE == INT4:
        ROWS: tl.constexpr = codes.shape[0]
        WIDTH: tl.constexpr = 2 * codes.shape[1]
        both = tl.reshape(tl.join(codes & 15, codes >> 4), [ROWS, WIDTH]).to(tl.int32)
        numbers = (both | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    elif CODE == INT8:
        above = codes.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x80
        numbers = (above | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        # Its bits are float16's one place lower, less 8 in the exponent: an A100 knows no E4M3.
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers


@triton.jit
def codes_by_codes(
    x,
    x_scales,
    codes,
    scales,
    M,
    splits,
    factor,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr,
    CODE: tl.constexpr,
):
    """Codes times codes on the matrix units: program (tile of M, tile of N, split).

    Args:
        x: [M, K], with scales [M, groups].
        GROUPED: whether there are several groups, of BLOCK_K inputs: the sums of each are scaled
            before they are added.
        CODE: INT8 or E4M3.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    blocks = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(blocks, splits)
    lane = tl.arange(0, BLOCK_K)
    WIDE: tl.constexpr = tl.int32 if CODE == INT8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32 if GROUPED else WIDE)
    for block in range(split * share, tl.minimum(split * share + share, blocks)):
        first = block * BLOCK_K
        of_group = first // GROUP
        byte = first - of_group * GROUP + lane
        rows = codes + (of_group.to(tl.int64) * N + n)[:, None] * GROUP_BYTES
        there = (n < N)[:, None] & (byte < GROUP_BYTES)[None, :]
        weights = tl.load(rows + byte[None, :], mask=there, other=0)
        channel = first + lane
        there = (m < M)[:, None] & (channel < K)[None, :]
        inputs = tl.load(x + m[:, None] * K + channel[None, :], mask=there, other=0)
        if CODE == E4M3:
            weights = weights.to(tl.float8e4nv, bitcast=True)
            inputs = inputs.to(tl.float8e4nv, bitcast=True)
        if GROUPED:
            products = tl.dot(weights, tl.trans(inputs), out_dtype=WIDE)
            scale = tl.load(scales + block * N + n, mask=n < N, other=0.0).to(tl.float32)
            x_scale = tl.load(x_scales + m * tl.cdiv(K, GROUP) + block, mask=m < M, other=0.0)
            acc += products.to(tl.float32) * (scale[:, None] * x_scale[None, :])
        elif CODE == INT8:
            acc = tl.dot(weights, tl.trans(inputs), acc, out_dtype=WIDE)
        else:
            # Hopper's own sums of FP8 have 14 bits: they go to float32 after each block.
            acc = tl.dot(weights, tl.trans(inputs), acc, max_num_imprecise_acc=BLOCK_K)
    result = acc.to(tl.float32) * factor
    if not GROUPED:
        scale = tl.load(scales + n, mask=n < N, other=0.0)
        x_scale = tl.load(x_scales + m, mask=m < M, other=0.0)
        result *= scale[:, None] * x_scale[None, :]
    _store(out, result, split, m, n, M, N)


@triton.jit
def _store(out, acc, split, m, n, M, N: tl.constexpr):
    place = out + split.to(tl.int64) * M * N + m[None, :] * N + n[:, None]
    there = (n < N)[:, None] & (m < M)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there)
