"""The Triton kernels of paged attention; only jax_triton.py imports them, where Triton is.

FlashAttention-2 (Dao, 2023) over pages (Kwon et al., 2023). A tile is TILE tokens of one run
with the GROUP query heads of one kv head: row r of it is token r // GROUP, head r % GROUP, so
that each key that is loaded serves the whole group. The keys that a tile sees may be shared
among several programs ("splits", Flash-Decoding, Dao et al., 2023), which `combine` puts together.

Loads are masked here, at every ragged edge: what lies beyond is another sequence's, or NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT = tl.constexpr(0)
INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E5M2 = tl.constexpr(3)
LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""Less than any score; finite, so that the difference of two is a number."""


@triton.jit
def write_kv(
    k,
    v,
    positions,
    token_seqs,
    query_starts,
    block_tables,
    _k_pages,
    _v_pages,
    num_seqs,
    num_pages,
    k_pages,
    v_pages,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    CODE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Puts the keys and values of one token (the program's) in their place.

    Args:
        _k_pages, _v_pages: the same memory as `k_pages` and `v_pages`.
        num_pages: of a sequence in its block table.
        ROW: elements of a row in a page; H of a row that comes in.
        HEADS, WIDTH: KV_HEADS and H, up to a power of two.
        STORED: what pages hold, whatever their arrays say (`KVFormat.storage`).
        MOST: see `KVFormat.most`.
    """
    token = tl.program_id(0)
    k_pages = k_pages.to(tl.pointer_type(STORED), bitcast=True)
    v_pages = v_pages.to(tl.pointer_type(STORED), bitcast=True)
    if token < tl.load(query_starts + num_seqs):
        position = tl.load(positions + token)
        seq = tl.load(token_seqs + token)
        page = tl.load(block_tables + seq * num_pages + position // PAGE).to(tl.int64)
        head = tl.arange(0, HEADS)
        channel = tl.arange(0, WIDTH)[None, :]
        place = ((page * PAGE + position % PAGE) * KV_HEADS + head) * ROW
        rows = (token * KV_HEADS + head)[:, None] * H + channel
        inside = (head < KV_HEADS)[:, None] & (channel < H)
        keys = tl.load(k + rows, mask=inside, other=0.0)
        values = tl.load(v + rows, mask=inside, other=0.0)
        _write_rows(k_pages + place, keys, head < KV_HEADS, channel, H, CODE, MOST)
        _write_rows(v_pages + place, values, head < KV_HEADS, channel, H, CODE, MOST)


@triton.jit
def _write_rows(
    places, rows, there, channel, H: tl.constexpr, CODE: tl.constexpr, MOST: tl.constexpr
):
    inside = there[:, None] & (channel < H)
    if CODE == FLOAT:
        tl.store(places[:, None] + channel, rows.to(places.dtype.element_ty), mask=inside)
    else:
        rows = rows.to(tl.float32)
        largest = tl.max(tl.abs(rows), 1)
        most = tl.full(largest.shape, MOST, tl.float32)
        # `/` is no more than nearly right on a GPU; codes are to be those of `KVFormat.encode`.
        factor = tl.where(largest > 1e-30, tl.div_rn(most, largest), 0.0)
        scaled = tl.minimum(tl.maximum(rows * factor[:, None], -MOST), MOST)
        tl.store(places[:, None] + channel, _codes(scaled, CODE), mask=inside)
        scales = (places + H).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales, tl.div_rn(largest, most), mask=there)


@triton.jit
def _codes(x, CODE: tl.constexpr):
    """The nearest codes of numbers within their range, as bytes.

    FP8 by hand: an A100 has no instruction for E4M3.
    """
    if CODE == INT8:
        return _round(x).to(tl.int32).to(tl.uint8)
    MANTISSA: tl.constexpr = 3 if CODE == E4M3 else 2
    BIAS: tl.constexpr = 7 if CODE == E4M3 else 15
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    half = (1 << (22 - MANTISSA)) - 1 + ((bits >> (23 - MANTISSA)) & 1)
    normal = ((bits + half) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    small = _round(size * 2.0 ** (BIAS - 1 + MANTISSA)).to(tl.int32)
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    return (tl.where(x < 0, 0x80, 0) | code).to(tl.uint8)


@triton.jit
def _round(x):
    """To the nearest integer, ties to even, of less than 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _numbers(codes, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """What codes stand for; those of E4M3 for a 256th, which `_scales` makes good."""
    if CODE == FLOAT:
        return codes.to(DTYPE)
    if CODE == INT8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    wide = codes.to(tl.uint16)
    # E5M2 is the upper half of float16; E4M3 its bits one place lower, less 8 in the exponent.
    bits = wide << 8 if CODE == E5M2 else ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def _scales(rows, there, H: tl.constexpr, CODE: tl.constexpr):
    """Of rows in pages, whose places are given."""
    scales = (rows + H).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(scales, mask=there, other=0.0) * (256.0 if CODE == E4M3 else 1.0)


@triton.jit
def attend(
    q,
    k_pages,
    v_pages,
    query_starts,
    kv_lens,
    block_tables,
    sinks,
    num_tokens,
    num_seqs,
    num_pages,
    splits,
    out,
    part_largest,
    part_total,
    DECODE_ONLY: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    CODE: tl.constexpr,
    DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One split of one tile: program (tile, kv head, split).

    Args:
        sinks: float32 [N], where there are any (SINKS) and parts are not put together later.
        num_pages: of a sequence in its block table.
        out: [T, N, H], or with SPLIT [T, N, splits, H] in float32, not yet divided by the sums
            of weights (`part_total`); the scores in them are less `part_largest`.
        KEYS: loaded together; a split has at least LEAST times as many.
        DTYPE, VALUE_DTYPE: in which scores and results are multiplied.
        SCALE, CAP: scores are in units of log 2: SCALE * q.k, or with CAP
            CAP * tanh(SCALE / (2 log2 e) * q.k).
        WINDOW: 0 is none.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles of a prompt see most: first
    head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE_ONLY:
        seq = tile
        start = tile
        count = 1
        length = tl.load(kv_lens + seq)
    else:
        seq = _run_of(tile, query_starts, num_seqs, TILE)
        begin = tl.load(query_starts + seq)
        padding = seq == num_seqs
        end = tl.load(query_starts + tl.minimum(seq + 1, num_seqs))
        end = tl.where(padding, num_tokens, end)
        start = begin + (tile - begin // TILE - seq) * TILE
        count = end - start
        if count <= 0:
            return
        length = tl.where(padding, 0, tl.load(kv_lens + tl.minimum(seq, num_seqs - 1)))
    first = length - count
    count = tl.minimum(count, TILE)
    stop = tl.maximum(first + count, 0)
    bottom = 0
    if WINDOW > 0:
        bottom = tl.maximum(first - WINDOW + 1, 0)

    k_pages = k_pages.to(tl.pointer_type(STORED), bitcast=True)
    v_pages = v_pages.to(tl.pointer_type(STORED), bitcast=True)
    row = tl.arange(0, ROWS)
    token = row // GROUP
    real = token < count
    position = first + token
    channel = tl.arange(0, WIDTH)[None, :]
    place = ((start + token) * KV_HEADS + head) * GROUP + row % GROUP
    inside = real[:, None] & (channel < H)
    queries = tl.load(q + place[:, None] * H + channel, mask=inside, other=0.0).to(DTYPE)

    lowest = bottom // KEYS
    blocks = tl.cdiv(stop, KEYS) - lowest
    share = tl.maximum(tl.cdiv(blocks, splits), LEAST)
    from_block = lowest + tl.minimum(split * share, blocks)
    to_block = lowest + tl.minimum(split * share + share, blocks)

    lane = tl.arange(0, KEYS)
    largest = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for block in range(from_block, to_block):
        key = block * KEYS + lane
        there = (key >= bottom) & (key < stop)
        table = block_tables + seq * num_pages
        page = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + key % PAGE) * KV_HEADS + head) * ROW
        loaded = there[:, None] & (channel < H)
        codes = tl.load(k_pages + at[:, None] + channel, mask=loaded, other=0)
        keys = _numbers(codes, CODE, DTYPE)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
        if CODE != FLOAT:
            scores *= _scales(k_pages + at, there, H, CODE)[None, :]
        if CAP > 0:
            shrunk = tl.exp2(-tl.abs(scores))
            tanh = (1 - shrunk) / (1 + shrunk)
            scores = tl.where(scores < 0, -tanh, tanh) * CAP
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen & there[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if CODE != FLOAT:
            weights *= _scales(v_pages + at, there, H, CODE)[None, :]
        codes = tl.load(v_pages + at[:, None] + channel, mask=loaded, other=0)
        values = _numbers(codes, CODE, VALUE_DTYPE)
        acc = tl.dot(weights.to(VALUE_DTYPE), values, acc * shrink[:, None], input_precision="ieee")
        largest = new_largest

    if SPLIT:
        part = place * splits + split
        used = inside & (from_block < to_block)
        tl.store(out + part.to(tl.int64)[:, None] * H + channel, acc, mask=used)
        tl.store(part_largest + part, largest, mask=real)
        tl.store(part_total + part, total, mask=real)
    else:
        if SINKS:
            sink = tl.load(sinks + head * GROUP + row % GROUP) * LOG2E
            top = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - top)
            acc *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - top)
        result = acc / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + place[:, None] * H + channel, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _run_of(tile, query_starts, num_seqs, TILE: tl.constexpr):
    """The run whose tile this is; num_seqs for the padding behind the last.

    Run s has the tiles from query_starts[s] // TILE + s on, which may be one more than it needs.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def combine(
    parts,
    part_largest,
    part_total,
    sinks,
    splits,
    out,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The result of one token and head (the program's) from those of its splits.

    Args:
        SPLITS: `splits`, up to a power of two.
    """
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, WIDTH)
    part = row * splits + split
    total = tl.load(part_total + part, mask=split < splits, other=0.0)
    largest = tl.load(part_largest + part, mask=split < splits, other=NOTHING)
    # A split that saw nothing has written no result.
    used = total > 0
    top = tl.max(largest, 0)
    sink = 0.0
    if SINKS:
        sink_score = tl.load(sinks + row % HEADS) * LOG2E
        top = tl.maximum(top, sink_score)
        sink = tl.exp2(sink_score - top)
    weights = tl.where(used, tl.exp2(largest - top), 0.0)
    inside = used[:, None] & (channel < H)[None, :]
    at = parts + part.to(tl.int64)[:, None] * H + channel[None, :]
    acc = tl.sum(tl.load(at, mask=inside, other=0.0) * weights[:, None], 0)
    result = acc / tl.maximum(tl.sum(total * weights, 0) + sink, 1e-30)
    tl.store(out + row * H + channel, result.to(out.dtype.element_ty), mask=channel < H)
