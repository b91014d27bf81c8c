"""Attention blocks with random weights, sequences in pages, and the same in plain XLA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from coded_weights import CODED, random_codes
from jax import Array
from random_weights import random_rows, unpacked

from llmjax.nn.rope import Rotation, rotate
from llmjax_kernels.kv_format import KV_FORMATS, KVFormat
from llmjax_kernels.layout import PagedKV, RaggedBatch, make_ragged_batch
from llmjax_kernels.native.blocks import LANES, Projection, QKNorm, Residual, attention_block
from llmjax_kernels.packed import PackedWeight, pack_float
from llmjax_kernels.paged_attention import AttentionSpec, paged_attention

EPS = 1e-5
LAYERS, LAYER = 3, 1
"""Of the pool of pages, and the one that a block computes."""


@dataclass(frozen=True)
class Case:
    """The shape and the arithmetic of one layer's attention.

    Attributes:
        rotary: channels of a head that rotate, half of them each way.
        formats: of the weights of q, k, v and o.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotary: int = 32
    width: int = 48
    page_size: int = 16
    kv_dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    norm: bool = True
    bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    post_norm: bool = False
    residual_scale: float = 1.0
    formats: tuple[str, str, str, str] = ("float32",) * 4

    @property
    def format(self) -> KVFormat:
        return KV_FORMATS[self.kv_dtype]

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.window, self.softcap)


@dataclass(frozen=True)
class Weights:
    """The arrays that a layer's attention takes."""

    norm: Array | None
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    qk_norm: QKNorm | None
    post_norm: Array | None


class Layer:
    """A case's attention with random weights, natively and in plain XLA."""

    def __init__(self, case: Case):
        self.case = case
        rng = np.random.default_rng(0)
        q_width, kv_width = case.heads * case.head_dim, case.kv_heads * case.head_dim
        inputs = (case.width, case.width, case.width, q_width)
        outputs = (q_width, kv_width, kv_width, case.width)
        projections = [
            Projection(_weight(format, N, K, rng), _vector(rng, N) if case.bias else None)
            for format, N, K in zip(case.formats, outputs, inputs, strict=True)
        ]
        qk_norm = None
        if case.qk_norm:
            whole = case.qk_norm == "full"
            sizes = (q_width, kv_width) if whole else (case.head_dim, case.head_dim)
            qk_norm = QKNorm(*(1 + _vector(rng, n) for n in sizes))
        self.weights = Weights(
            1 + _vector(rng, case.width) if case.norm else None,
            *projections,
            qk_norm,
            1 + _vector(rng, case.width) if case.post_norm else None,
        )

    def rope(self, batch: RaggedBatch) -> Rotation:
        half = self.case.rotary // 2
        angles = batch.positions[:, None] * jnp.asarray(100.0 ** (-np.arange(half) / max(half, 1)))
        return Rotation(jnp.cos(angles), jnp.sin(angles))

    @cached_property
    def native(self):
        """(x, pages, query_starts, kv_lens, block_tables) -> (output, pages)."""

        @partial(jax.jit, donate_argnums=1)
        def run(x: Array, kv: PagedKV, starts: Array, kv_lens: Array, tables: Array):
            batch = make_ragged_batch(starts, kv_lens, tables, len(x), decode_only=False)
            w, case = self.weights, self.case
            return attention_block(
                x,
                w.norm,
                *(w.q, w.k, w.v, w.o),
                w.qk_norm,
                self.rope(batch),
                Residual(w.post_norm, case.residual_scale),
                EPS,
                kv,
                LAYER,
                batch,
                case.spec,
            )

        return run

    @cached_property
    def reference(self):
        """The same by the reference's kernel, on its own layout of float32 pages."""

        @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def run(x: Array, kv: PagedKV, starts: Array, kv_lens: Array, tables: Array):
            batch = make_ragged_batch(starts, kv_lens, tables, len(x), decode_only=False)
            w, case = self.weights, self.case
            normed = x if w.norm is None else rms_norm(x, w.norm)
            q, k, v = (project(normed, p) for p in (w.q, w.k, w.v))
            if case.qk_norm == "full":
                q, k = rms_norm(q, w.qk_norm.q), rms_norm(k, w.qk_norm.k)
            q, k, v = (y.reshape(len(x), -1, case.head_dim) for y in (q, k, v))
            if case.qk_norm == "head":
                q, k = rms_norm(q, w.qk_norm.q), rms_norm(k, w.qk_norm.k)
            q, k = (rotate(y, self.rope(batch)) for y in (q, k))
            k, v = (case.format.decode(case.format.encode(y), jnp.float32) for y in (k, v))
            k, v = (y.astype(jnp.float32) for y in (k, v))
            out, kv = paged_attention(q, k, v, kv, batch, case.spec)
            out = project(out.reshape(len(x), -1), w.o)
            if w.post_norm is not None:
                out = rms_norm(out, w.post_norm)
            return x + case.residual_scale * out, kv

        return run


@cache
def layer_of(case: Case) -> Layer:
    """One for all examples, with one program each."""
    return Layer(case)


class Sequences:
    """Sequences of random length in pages of their own, in random order.

    Args:
        runs: (tokens before the step, tokens in the step) of each; no tokens is padding.
    """

    def __init__(self, case: Case, runs: list[tuple[int, int]], rng: np.random.Generator):
        self.case = case
        runs = [run if run[1] else (0, 0) for run in runs]
        counts = [count for _, count in runs]
        self.starts = np.cumsum([0, *counts]).astype(np.int32)
        self.kv_lens = np.array([sum(run) for run in runs], np.int32)
        needed = -(-self.kv_lens // case.page_size)
        self.num_pages = int(needed.sum()) + 3
        ids = rng.permutation(self.num_pages)
        # What lies behind a sequence's pages is the last one, which no sequence owns.
        self.tables = np.full((len(runs), max(1, *needed)), ids[-1], np.int32)
        for s, count in enumerate(needed):
            self.tables[s, :count], ids = ids[:count], ids[count:]
        shape = (self.num_pages, case.page_size, case.kv_heads, case.head_dim)
        self.k, self.v = (self.kept(rng.standard_normal(shape)) for _ in range(2))
        self.before, self.written = (np.zeros(shape[:2], bool) for _ in range(2))
        for s, (start, count) in enumerate(runs):
            position = np.arange(start + count)
            place = (self.tables[s, position // case.page_size], position % case.page_size)
            self.before[place] = position < start
            self.written[place] = position >= start

    def kept(self, values: np.ndarray) -> np.ndarray:
        """What is left of values in pages."""
        format = self.case.format
        rows = format.encode(jnp.asarray(values, jnp.float32))
        return np.asarray(format.decode(rows, jnp.float32), np.float32)

    @property
    def batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.starts, self.kv_lens, self.tables

    @property
    def reference_pages(self) -> PagedKV:
        return PagedKV(jnp.asarray(self.k), jnp.asarray(self.v), KV_FORMATS["float32"])

    @property
    def native_pages(self) -> PagedKV:
        """All layers' pages: NaN wherever no sequence has been."""

        def pages(values: np.ndarray) -> np.ndarray:
            layers = np.full((LAYERS, *values.shape), np.nan, np.float32)
            layers[LAYER] = np.where(self.before[..., None, None], values, np.nan)
            return np.asarray(self.case.format.encode(jnp.asarray(layers)))

        return to_native(pages(self.k), pages(self.v), self.case.format)


def to_native(k: np.ndarray, v: np.ndarray, format: KVFormat) -> PagedKV:
    """Pages of encoded rows, [L, pages, page_size, K, W], as the native kernels have them."""

    def blocks(rows: np.ndarray, order: tuple[int, int]) -> np.ndarray:
        L, pages, page_size, heads, width = rows.shape
        rows = rows.reshape(L, pages, page_size // LANES, LANES, heads, width)
        rows = rows.transpose(0, 1, 4, 2, 3, 5)  # L, pages, K, blocks, lanes, W
        head_dim = width - format.width(0)
        codes = rows[..., :head_dim].swapaxes(*order).reshape(*rows.shape[:4], -1)
        scales = rows[..., head_dim:].reshape(*rows.shape[:4], -1)
        return np.concatenate([codes, scales], -1)

    return PagedKV(blocks(k, (-1, -2)), blocks(v, (-1, -1)), format)


def from_native(kv: PagedKV) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as float32 [L, pages, page_size, K, H]."""
    format = kv.format

    def rows(blocks: np.ndarray, is_keys: bool) -> np.ndarray:
        L, pages, heads, count, size = blocks.shape
        head_dim = size // LANES - format.width(0)
        outer = blocks.shape[:4]
        codes, scales = np.split(blocks, [LANES * head_dim], -1)
        if is_keys:
            codes = codes.reshape(*outer, head_dim, LANES).swapaxes(-1, -2)
        codes = codes.reshape(*outer, LANES, head_dim)
        rows = np.concatenate([codes, scales.reshape(*outer, LANES, -1)], -1)
        rows = rows.transpose(0, 1, 3, 4, 2, 5).reshape(L, pages, count * LANES, heads, -1)
        return np.asarray(format.decode(jnp.asarray(rows), jnp.float32), np.float32)

    return rows(np.asarray(kv.k), True), rows(np.asarray(kv.v), False)


def rms_norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weight


def project(x: Array, p: Projection) -> Array:
    y = jnp.dot(x, unpacked(p.weight).T, precision="highest")
    return y if p.bias is None else y + p.bias


def _weight(format: str, N: int, K: int, rng: np.random.Generator) -> PackedWeight:
    if format == "float32":
        return pack_float((rng.standard_normal((N, K)) / np.sqrt(K)).astype(np.float32))
    seed = rng.integers(1000)
    make = random_codes if format in CODED else random_rows
    spread = make(format, N, K, np.random.default_rng(seed), 1.0).values.std()
    scale = 1 / (spread * np.sqrt(K))
    return make(format, N, K, np.random.default_rng(seed), scale).pack()


def _vector(rng: np.random.Generator, size: int) -> Array:
    return jnp.asarray(rng.standard_normal(size) * 0.3, jnp.float32)
