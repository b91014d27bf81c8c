"""How many pages fit, from what the device has and what weights and steps take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from ..config import CacheConfig, SchedulerConfig
from ..errors import ConfigError
from ..models import DecoderConfig

_GIB = 2**30


def page_bytes(config: DecoderConfig, page_size: int, dtype: Any) -> int:
    """Bytes of one page in all layers, keys and values."""
    width = config.num_kv_heads * config.head_dim
    return 2 * config.num_layers * page_size * width * np.dtype(dtype).itemsize


def count_pages(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    config: DecoderConfig,
    *,
    max_model_len: int,
    weight_bytes: int,
    dtype: Any,
) -> int:
    """Pages to allocate: what the memory share leaves, at most what could ever be used.

    Raises:
        ConfigError: not even one sequence's first page fits; carries the numbers.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    total, share = _device_memory(cache)
    budget = int(total * share) - weight_bytes - _step_bytes(scheduler, config, max_model_len)
    size = page_bytes(config, cache.block_size, dtype)
    useful = scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    pages = min(budget // size, useful)
    if pages < 1:
        raise ConfigError(
            f"no memory is left for KV pages: gpu_memory_utilization {share} of "
            f"{total / _GIB:.1f} GiB less {weight_bytes / _GIB:.2f} GiB of weights; raise "
            "gpu_memory_utilization or lower max_num_batched_tokens or max_num_seqs"
        )
    return int(pages)


def fit_context(
    asked: int | None, own: int, pages: int, cache: CacheConfig, scheduler: SchedulerConfig
) -> int:
    """The most tokens of a sequence that `pages` hold.

    A `max_model_len` that was asked for is kept or refused, as vLLM does. The model's own is
    lowered to what there is room for, but not below what one sequence brings to one step.

    Raises:
        ConfigError: the pages do not hold that; carries the numbers.
    """
    room = pages * cache.block_size
    step = min(own, scheduler.prefill_chunk_size, scheduler.max_num_batched_tokens)
    least, what = (asked, "max_model_len") if asked else (step, "one step of one sequence")
    if room < least:
        raise ConfigError(
            f"the KV pool holds {room} tokens ({pages} x {cache.block_size}), but {what} needs "
            f"{least} ({-(-least // cache.block_size)} pages); raise num_gpu_blocks_override or "
            "gpu_memory_utilization, or lower max_model_len"
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
