"""How long a step takes on a device that is not there: a roofline and a fixed cost.

seconds = max(bytes / bandwidth, operations / peak) + all-reduces + overhead

Bytes are the weights, read once a step, and the keys and values that each sequence reads;
operations those of the matrices on all rows of the step's bucket, padding included as the step
programs compute it, of the logits, and of attention. Bandwidth and peak are a share of what the
data sheet says (`memory_efficiency`, `compute_efficiency`). What type matrices are multiplied in is
said by `Weights`: those of a simulation are bytes only, and products stay those of bfloat16.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..cache.layout import KVLayout
from ..cache.page_store import Copy, Transfer
from ..config import KV_CACHE_DTYPES, CacheConfig, SchedulerConfig
from ..engine.context import DEVICE_SHARE, step_bytes
from ..engine.plan import Plan
from ..errors import ConfigError
from .shapes import ModelShape


@dataclass(frozen=True)
class Figures:
    """Of one device.

    Attributes:
        memory: bytes.
        bandwidth: of its memory, bytes a second.
        peak: operations a second on dense bfloat16 matrices, two a multiply and add.
        link: bytes a second to its peers, one way.
        host_link: bytes a second to the host's memory, one way.
        source: where they stand.
        int8, fp8, fp4: operations a second likewise on matrices of such codes; 0 where it has no
            units for them.
        compute_capability: 90 for 9.0; 0 of what is no NVIDIA GPU.
    """

    memory: float
    bandwidth: float
    peak: float
    link: float
    host_link: float
    source: str
    int8: float = 0.0
    fp8: float = 0.0
    fp4: float = 0.0
    compute_capability: int = 0

    def peak_of(self, products: str) -> float:
        """Operations a second on matrices of a type of `PRODUCTS`."""
        return self.peak if products == "bfloat16" else getattr(self, products)


DEVICES = {
    "h100": Figures(
        *(80e9, 3.35e12, 989.4e12, 450e9, 64e9, "NVIDIA H100 data sheet, SXM5; PCIe 5 x16"),
        int8=1978.9e12,
        fp8=1978.9e12,
        compute_capability=90,
    ),
    "h200": Figures(
        *(141e9, 4.8e12, 989.4e12, 450e9, 64e9, "NVIDIA H200 data sheet, SXM; PCIe 5 x16"),
        int8=1978.9e12,
        fp8=1978.9e12,
        compute_capability=90,
    ),
    "a100-80gb": Figures(
        *(80e9, 2.039e12, 312e12, 300e9, 32e9, "NVIDIA A100 data sheet, 80GB SXM4; PCIe 4 x16"),
        int8=624e12,
        compute_capability=80,
    ),
    "l4": Figures(
        *(24e9, 300e9, 121e12, 32e9, 32e9, "NVIDIA L4 data sheet; peers over PCIe 4 x16"),
        int8=242.5e12,
        fp8=242.5e12,
        compute_capability=89,
    ),
    "t4": Figures(
        *(16e9, 320e9, 65e12, 16e9, 16e9, "NVIDIA T4 data sheet, float16; peers over PCIe 3 x16"),
        int8=130e12,
        compute_capability=75,
    ),
    "b200": Figures(
        *(180e9, 8e12, 2.25e15, 900e9, 64e9, "NVIDIA DGX B200 data sheet, an eighth; PCIe 5 x16"),
        int8=4.5e15,
        fp8=4.5e15,
        fp4=9e15,
        compute_capability=100,
    ),
    "cpu": Figures(
        16e9, 52.3e9, 1.766e12, 52.3e9, 52.3e9, "two cores of an EPYC, docs/benchmarks/cpu.md: int8"
    ),
}
"""Peaks are those of dense matrices: data sheets that count sparsity say twice as much."""

PRODUCTS = ("bfloat16", "int8", "fp8", "fp4")
"""Types in which matrices are multiplied."""


@dataclass(frozen=True)
class Weights:
    """How weights are kept, and multiplied.

    Attributes:
        bits: of a weight of the layers' matrices, its share of scales counted.
        head_bits: of one of the matrix that makes logits, which may be the embedding too.
        embed_bits: of one of an embedding of its own.
        products: of `PRODUCTS`, of the layers' matrices.
        head_products: likewise of the matrix that makes logits.
    """

    name: str
    bits: float
    head_bits: float
    embed_bits: float
    products: str = "bfloat16"
    head_products: str = "bfloat16"


_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8": 8, "int4": 4}
WEIGHTS = {name: Weights(name, bits, bits, bits) for name, bits in _BITS.items()}
SCALE_BYTES = 4
"""Of each 8-bit row of a page: one position's key, or value, of one head."""
KV_DTYPES = tuple(dtype for dtype in KV_CACHE_DTYPES if dtype != "auto")
REDUCE_LATENCY = 10e-6
"""Seconds that an all-reduce takes beside its bytes; an estimate."""


@dataclass(frozen=True)
class Work:
    """What one step computes; of an average step also parts.

    Attributes:
        rows: of every matrix product, padding counted.
        sampled: rows of logits.
        seen: of each chunk and layer the tokens whose keys and values are read, summed.
        pairs: of each position and layer the tokens that it attends to, summed.
    """

    rows: float
    sampled: float
    seen: float
    pairs: float

    @classmethod
    def of(
        cls,
        chunks: Iterable[tuple[int, int]],
        windows: Mapping[int | None, int],
        *,
        rows: int,
        sampled: int,
    ) -> Work:
        """Of chunks, each its start and count.

        Args:
            windows: layers, by window.
        """
        seen = pairs = 0
        for window, layers in windows.items():
            for start, count in chunks:
                end = start + count
                if window is None or end <= window:
                    seen += layers * end
                    pairs += layers * (count * start + count * (count + 1) // 2)
                else:
                    seen += layers * min(end, window + count - 1)
                    short = max(0, min(count, window - start))  # positions that see all before
                    whole = short * start + short * (short + 1) // 2
                    pairs += layers * (whole + (count - short) * window)
        return cls(rows, sampled, seen, pairs)


@dataclass(frozen=True)
class Machine:
    """A model on one device, or on several by tensor parallelism: one replica.

    Attributes:
        kv_dtype: one of `KV_DTYPES`; 8-bit ones keep a scale for each token and head.
        tensor_parallel: devices that share every layer.
        overhead: seconds of a step beside the roofline: launches, and what the host adds.
    """

    shape: ModelShape
    figures: Figures
    weights: Weights = WEIGHTS["bfloat16"]
    kv_dtype: str = "bfloat16"
    tensor_parallel: int = 1
    overhead: float = 1e-3
    memory_efficiency: float = 0.8
    compute_efficiency: float = 0.6

    def __post_init__(self) -> None:
        heads, size = self.shape.num_heads, self.tensor_parallel
        if size < 1 or heads % size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, allowed: divisors of the {heads} heads"
            )
        if not 0 <= self.overhead < math.inf:
            raise ConfigError(f"step_overhead_ms is {1e3 * self.overhead}, allowed: 0 or more")
        for name in ("memory_efficiency", "compute_efficiency"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}, allowed: above 0 up to 1")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}, allowed: {', '.join(KV_DTYPES)}")
        can = [name for name in PRODUCTS if self.figures.peak_of(name)]
        for products in (self.weights.products, self.weights.head_products):
            if products not in can:
                raise ConfigError(
                    f"{self.weights.name} weights are multiplied as {products}, allowed on this "
                    f"device: {', '.join(can)}"
                )

    @cached_property
    def windows(self) -> Counter[int | None]:
        """Layers, by window."""
        return Counter(self.shape.windows)

    @property
    def weight_bytes(self) -> int:
        shape, weights = self.shape, self.weights
        bits = shape.matrix_params * weights.bits + shape.head_params * weights.head_bits
        if not shape.tie_embeddings:
            bits += shape.head_params * weights.embed_bits
        return int(bits // 8)

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer, on all devices: heads that do not divide are copied, or filled
        up with zeros."""
        heads = self.tensor_parallel * -(-self.shape.num_kv_heads // self.tensor_parallel)
        width = self.shape.head_dim
        row = {"float32": 4 * width, "bfloat16": 2 * width}.get(self.kv_dtype, width + SCALE_BYTES)
        return 2 * heads * row

    def page_bytes(self, layout: KVLayout) -> int:
        return layout.layers_per_page * layout.block_size * self.kv_bytes

    def temporaries(self, scheduler: SchedulerConfig, max_model_len: int) -> int:
        """Bytes that the largest step takes beside weights and pages, on all devices."""
        return self.tensor_parallel * step_bytes(scheduler, self.shape, max_model_len)

    def count_pages(
        self,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        layout: KVLayout,
        *,
        max_model_len: int,
    ) -> int:
        """Pages that the memory holds beside weights and the largest step's temporaries.

        Raises:
            ConfigError: none; carries the numbers.
        """
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        share = cache.gpu_memory_utilization or DEVICE_SHARE
        total = self.tensor_parallel * self.figures.memory
        steps = self.temporaries(scheduler, max_model_len)
        left = total * share - self.weight_bytes - steps
        pages = int(left // self.page_bytes(layout))
        if pages < 1:
            raise ConfigError(
                f"no memory is left for KV pages: {share} of {total / 1e9:.0f} GB, less "
                f"{self.weight_bytes / 1e9:.1f} GB of weights and {steps / 1e9:.1f} GB that steps "
                "take; raise tensor_parallel_size or gpu_memory_utilization, or lower "
                "max_num_batched_tokens or max_num_seqs"
            )
        return pages

    def seconds(self, work: Work) -> float:
        """Of one step, without what it moves."""
        roof = max(self.read_seconds(work), self.compute_seconds(work))
        return roof + self._reduce(work.rows) + self.overhead

    def read_bytes(self, work: Work) -> float:
        """That one step reads, on all devices: matrices, keys and values."""
        shape, weights = self.shape, self.weights
        # A row of an embedding that is not the head's matrix as well is all that is read of it.
        bits = shape.matrix_params * weights.bits + shape.head_params * weights.head_bits
        return bits / 8 + work.seen * self.kv_bytes

    def read_seconds(self, work: Work) -> float:
        """Of what one step reads."""
        bandwidth = self.tensor_parallel * self.memory_efficiency * self.figures.bandwidth
        return self.read_bytes(work) / bandwidth

    def compute_seconds(self, work: Work) -> float:
        """Of what one step multiplies; attention in bfloat16, whatever pages keep."""
        shape, weights = self.shape, self.weights
        operations = (
            (2 * shape.matrix_params * work.rows, weights.products),
            (2 * shape.head_params * work.sampled, weights.head_products),
            (4 * shape.num_heads * shape.head_dim * work.pairs, "bfloat16"),
        )
        return sum(count / self._rate(products) for count, products in operations)

    def _rate(self, products: str) -> float:
        """Operations a second that all devices reach."""
        return self.tensor_parallel * self.compute_efficiency * self.figures.peak_of(products)

    def _reduce(self, rows: float) -> float:
        """Two all-reduces a layer of activations in 16 bits, in a ring."""
        size = self.tensor_parallel
        if size == 1:
            return 0.0
        moved = 2 * (size - 1) / size * rows * self.shape.hidden_size * 2
        return 2 * self.shape.num_layers * (REDUCE_LATENCY + moved / self.figures.link)

    def move_seconds(self, transfers: Iterable[Transfer], page_bytes: int) -> float:
        """Of page copies: within memory, each read and written, or over the host's link."""
        copies = Counter(type(transfer) is Copy for transfer in transfers)
        bandwidth = self.tensor_parallel * self.memory_efficiency * self.figures.bandwidth
        return 2 * copies[True] * page_bytes / bandwidth + copies[False] * self.host_seconds(
            page_bytes
        )

    def host_seconds(self, page_bytes: int) -> float:
        """Of one page to the host or back; each device moves its own part."""
        return page_bytes / (self.tensor_parallel * self.memory_efficiency * self.figures.host_link)

    def token_seconds(self) -> float:
        """Of one prompt token among many."""
        return 2 * self.shape.matrix_params / self._rate(self.weights.products)

    def step_seconds(self, plan: Plan, page_bytes: int) -> float:
        """Of a planned step, or several, with what is moved first."""
        seconds = self.move_seconds(plan.transfers, page_bytes)
        for step in range(plan.num_steps):
            work = Work.of(
                [(c.start + step, c.width) for c in plan.chunks if step <= c.count - c.width],
                self.windows,
                rows=plan.bucket.tokens,
                sampled=plan.bucket.seqs,
            )
            seconds += self.seconds(work)
        return seconds
