"""The paged KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_types, require

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
KV_EVICTIONS = ("streaming", "snapkv")
DEFAULT_KV_BUDGET = 2048
MOST_GIB = 2**20


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV pool.

    Attributes:
        block_size: tokens in a page.
        num_gpu_blocks_override: pages to allocate instead of what memory would allow.
        gpu_memory_utilization: the share of the device's memory that weights, step
            temporaries and pages may fill together; by default 0.9 of an accelerator, 0.2
            of the host's memory on a CPU, where others work too.
        kv_cache_dtype: how pages keep keys and values. "auto" is what the checkpoint asks for,
            if it does; else bfloat16, but float32 where weights are float32. "int8", "fp8_e4m3"
            and "fp8_e5m2" take half of bfloat16's room and a scale for each token and head.
        enable_prefix_caching: keep what requests have computed for others that begin alike,
            as long as there is room. Choices of one request share their prompt in any case.
        swap_space: GiB of host memory for the pages of preempted requests, where moving them
            there and back takes less time than to compute them again. Replicas share it out. The
            default is lowered to the memory there is.
        kv_offloading_size: GiB of host memory for pages that leave the prefix cache for want
            of room, by the same rule.
        kv_eviction: what a request forgets that gets longer than `kv_budget`; by default nothing.
            "streaming" keeps its first tokens and the most recent ones (attention sinks), and
            `max_model_len` may then exceed what the model was trained for. "snapkv" keeps those
            that attention looks at most (heavy hitters), and a quarter that is recent.
        kv_budget: most tokens of a request whose keys and values are kept with `kv_eviction`;
            by default 2048.
    """

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    swap_space: float = 4.0
    kv_offloading_size: float = 0.0
    kv_eviction: str | None = None
    kv_budget: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        size = self.block_size
        require(
            1 <= size <= 256 and size & (size - 1) == 0,
            f"block_size is {size}, allowed: a power of two from 1 to 256",
        )
        share = self.gpu_memory_utilization
        require(
            share is None or 0 < share <= 1,
            f"gpu_memory_utilization is {share}, allowed: above 0 up to 1",
        )
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"kv_cache_dtype is {self.kv_cache_dtype!r}, allowed: {', '.join(KV_CACHE_DTYPES)}",
        )
        for name in ("swap_space", "kv_offloading_size"):
            value = getattr(self, name)
            require(0 <= value <= MOST_GIB, f"{name} is {value}, allowed: 0 to {MOST_GIB} GiB")
        blocks = self.num_gpu_blocks_override
        require(
            blocks is None or blocks >= 1,
            f"num_gpu_blocks_override is {blocks}, allowed: 1 or more",
        )
        eviction, budget = self.kv_eviction, self.kv_budget
        require(
            eviction is None or eviction in KV_EVICTIONS,
            f"kv_eviction is {eviction!r}, allowed: {', '.join(KV_EVICTIONS)}, or none",
        )
        require(
            budget is None or eviction is not None,
            f"kv_budget is {budget}, allowed: none, as kv_eviction is none",
        )
        require(
            budget is None or (budget >= 8 * size and budget % size == 0),
            f"kv_budget is {budget}, allowed: multiples of the block_size ({size}) from "
            f"{8 * size} on",
        )

    @property
    def most_kept(self) -> int:
        """Most tokens of a request that are kept, where `kv_eviction` says what goes."""
        return self.kv_budget or DEFAULT_KV_BUDGET
