"""How many pages fit, from what the device has and what weights and steps take."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import jax
import psutil

from llmjax_kernels.kv_format import KVFormat

from ..cache.layout import KVLayout
from ..config import CacheConfig, SchedulerConfig
from ..errors import ConfigError
from ..models import DecoderConfig

_GIB = 2**30


def page_bytes(config: DecoderConfig, layout: KVLayout, format: KVFormat) -> int:
    """Bytes of one page, the keys and values of one group's layers."""
    rows = layout.layers_per_page * layout.block_size * config.num_kv_heads
    return 2 * rows * format.row_bytes(config.head_dim)


def most_chunk(scheduler: SchedulerConfig, max_model_len: int) -> int:
    """Most tokens of one sequence in a step."""
    most = min(scheduler.max_num_batched_tokens, max_model_len)
    return min(most, scheduler.prefill_chunk_size) if scheduler.enable_chunked_prefill else most


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
    budget = int(total * share) - weight_bytes - _step_bytes(scheduler, config, max_model_len)
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


def fit_context(
    asked: int | None, own: int, pages: int, layout: KVLayout, scheduler: SchedulerConfig
) -> int:
    """The most tokens of a sequence that `pages` hold.

    A `max_model_len` that was asked for is kept or refused, as vLLM does. The model's own is
    lowered to what there is room for, but not below what one sequence brings to one step.

    Raises:
        ConfigError: the pages do not hold that; carries the numbers.
    """

    def needed(length: int) -> int:
        return layout.most_pages(length, most_chunk(scheduler, length))

    room = bisect_right(range(own + 1), pages, key=needed) - 1
    step = min(own, scheduler.prefill_chunk_size, scheduler.max_num_batched_tokens)
    least, what = (asked, "max_model_len") if asked else (step, "one step of one sequence")
    if room < least:
        raise ConfigError(
            f"the KV pool holds {room} tokens ({pages} pages), but {what} needs {least} "
            f"({needed(least)} pages); raise num_gpu_blocks_override or gpu_memory_utilization, "
            "or lower max_model_len"
        )
    return min(room, asked or own)


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


def _step_bytes(scheduler: SchedulerConfig, config: DecoderConfig, max_model_len: int) -> int:
    """An estimate of the largest step's temporaries: float32 logits, and activations."""
    logits = 4 * scheduler.max_num_seqs * config.vocab_size * 4
    tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_model_len)
    width = 4 * config.hidden_size + 3 * config.mlp_size + 4 * config.num_heads * config.head_dim
    return logits + 4 * tokens * width
