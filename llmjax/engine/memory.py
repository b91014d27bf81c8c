"""How many pages fit, from what the device has and what weights and steps take."""

from __future__ import annotations

from pathlib import Path

import jax
import psutil

from llmjax_kernels.kv_format import KVFormat

from ..cache.layout import KVLayout
from ..config import CacheConfig, SchedulerConfig
from ..errors import ConfigError
from ..models import DecoderConfig
from .context import step_bytes

_GIB = 2**30


def page_bytes(config: DecoderConfig, layout: KVLayout, format: KVFormat) -> int:
    """Bytes of one page, the keys and values of one group's layers."""
    rows = layout.layers_per_page * layout.block_size * config.num_kv_heads
    return 2 * rows * format.row_bytes(config.head_dim)


def count_pages(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    config: DecoderConfig,
    layout: KVLayout,
    *,
    max_model_len: int,
    weight_bytes: int,
    format: KVFormat,
) -> int:
    """Pages to allocate: what the memory share leaves, at most what could ever be used.

    Raises:
        ConfigError: not even one sequence's first page fits; carries the numbers.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    total, share = _device_memory(cache)
    budget = int(total * share) - weight_bytes - step_bytes(scheduler, config, max_model_len)
    size = page_bytes(config, layout, format)
    useful = scheduler.max_num_seqs * layout.num_groups * layout.num_blocks(max_model_len)
    pages = min(budget // size, useful)
    if pages < 1:
        raise ConfigError(
            f"no memory is left for KV pages: gpu_memory_utilization {share} of "
            f"{total / _GIB:.1f} GiB less {weight_bytes / _GIB:.2f} GiB of weights; raise "
            "gpu_memory_utilization or lower max_num_batched_tokens or max_num_seqs"
        )
    return int(pages)


def _device_memory(cache: CacheConfig) -> tuple[int, float]:
    """Bytes of memory there are in all, and the share of them to fill.

    In all, not free just now: the number of pages shapes the compiled programs, which the
    next start finds on disk only if it comes to the same number.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"], cache.gpu_memory_utilization or 0.9
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total, cache.gpu_memory_utilization or 0.2
