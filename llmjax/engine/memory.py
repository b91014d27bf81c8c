"""How many pages fit, from what the device has and what weights and steps take."""

from __future__ import annotations

import jax

from llmjax_kernels.host_memory import total_bytes
from llmjax_kernels.kv_format import KVFormat

from ..cache.layout import KVLayout
from ..checkpoint import LoadedModel
from ..config import CacheConfig, EngineConfig
from ..errors import ConfigError
from ..models import DecoderConfig
from ..parallel.group import Group
from .buckets import Buckets
from .context import DEVICE_SHARE, HOST_SHARE, step_bytes
from .pipeline import make_programs, stage_layouts

_GIB = 2**30


def page_bytes(config: DecoderConfig, layout: KVLayout, format: KVFormat) -> int:
    """Bytes of one page, the keys and values of one group's layers."""
    rows = layout.layers_per_page * layout.block_size * config.num_kv_heads
    return 2 * rows * format.row_bytes(config.head_dim)


def count_pages(
    config: EngineConfig,
    model: LoadedModel,
    layout: KVLayout,
    format: KVFormat,
    buckets: Buckets,
    group: Group | None = None,
) -> int:
    """Pages to allocate: those asked for, or what the memory share leaves, at most what could
    ever be used.

    What the largest step takes beside weights and pages is an estimate; where memory is the
    device's own, what its program takes, which is compiled for this.

    Args:
        buckets: of the longest sequences asked for.
        group: processes that all get as many pages, as the one with the least room has.

    Raises:
        ConfigError: not even one sequence's first page fits, or not those asked for; carries the
            numbers.
    """
    longest = config.model.max_model_len or model.config.max_position
    scheduler = config.scheduler
    needs = [(model.weight_bytes, page_bytes(model.config, layout, format))]
    if _bytes_limit() is not None:
        # Of each stage's devices, each of which has its heads of every page.
        tensor = config.parallel.tensor_parallel_size
        kept = [page_bytes(model.config, k, format) for k in stage_layouts(model, layout)]
        needs = [(p.device_bytes, k // tensor) for p, k in zip(model.parts, kept, strict=True)]
    total, share = _device_memory(config.cache)
    if _bytes_limit() is None:
        total //= config.parallel.data_parallel_size  # all replicas are in the host's memory
    if (given := config.cache.num_gpu_blocks_override) is not None:
        for weights, size in needs:
            _check_given(given, weights, config.prefill.num_pools * size, total)
        return given
    useful = scheduler.max_num_seqs * layout.num_groups * layout.held_blocks(longest)

    def pages_beside(temporaries: int) -> int:
        most = useful
        for weights, size in needs:
            budget = int(total * share) - weights - temporaries
            if budget < size:
                raise ConfigError(
                    f"no memory is left for KV pages: gpu_memory_utilization {share} of "
                    f"{total / _GIB:.2f} GiB less {weights / _GIB:.2f} GiB of weights and "
                    f"{temporaries / _GIB:.2f} GiB of a step's temporaries; raise "
                    "gpu_memory_utilization or lower max_num_batched_tokens or max_num_seqs"
                )
            most = min(most, budget // size)
        return most if group is None else group.least(most)

    pages = pages_beside(step_bytes(scheduler, model.config, longest))
    if _bytes_limit() is None:
        # A host's memory is shared with others and filled to a fifth: the estimate does, and a
        # start need not wait for the largest program.
        return pages
    programs = make_programs(
        model,
        layout,
        format,
        slots=scheduler.max_num_seqs,
        max_model_len=longest,
        max_logprobs=config.max_logprobs,
        num_steps=scheduler.num_scheduler_steps,
    )
    temporaries = programs.temporaries(buckets.largest, pages)
    if scheduler.num_scheduler_steps > 1:
        temporaries = max(temporaries, programs.temporaries(buckets.largest_decode, pages))
    return pages_beside(temporaries)


def _check_given(pages: int, weights: int, size: int, total: int) -> None:
    """Refuses pages of `size` bytes for which there is no room even beside weights alone."""
    most = max(0, (total - weights) // size)
    if pages > most:
        raise ConfigError(
            f"num_gpu_blocks_override is {pages}, which takes {-(-pages * size // _GIB)} GiB, "
            f"allowed: up to {most}, as of {total / _GIB:.2f} GiB of memory weights take "
            f"{weights / _GIB:.2f} GiB"
        )


def host_space(cache: CacheConfig) -> tuple[float, float]:
    """GiB of host memory for preempted requests, and for what leaves the prefix cache.

    A `swap_space` that nobody chose is no more than there is.

    Raises:
        ConfigError: the host does not have as much; carries the numbers.
    """
    # Pages are touched as they are used: what is too much would be found out under load.
    there = total_bytes() * jax.process_count() / _GIB  # each process has its part of a page
    swap, offload = cache.swap_space, cache.kv_offloading_size
    if swap == CacheConfig.swap_space:
        swap = min(swap, max(0.0, there - offload))
    if swap + offload > there:
        asked = {"swap_space": swap, "kv_offloading_size": offload}
        asked = {name: gib for name, gib in asked.items() if gib}
        raise ConfigError(
            f"{' and '.join(f'{name} is {gib} GiB' for name, gib in asked.items())}, allowed: "
            f"up to {there:.2f} GiB{' together' if len(asked) > 1 else ''}, the host's memory"
        )
    return swap, offload


def _bytes_limit() -> int | None:
    """What the device has, where it has memory of its own."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _device_memory(cache: CacheConfig) -> tuple[int, float]:
    """Bytes of memory there are in all, and the share of them to fill.

    In all, not free just now: the number of pages shapes the compiled programs, which the
    next start finds on disk only if it comes to the same number.
    """
    if (own := _bytes_limit()) is not None:
        return own, cache.gpu_memory_utilization or DEVICE_SHARE
    return total_bytes(), cache.gpu_memory_utilization or HOST_SHARE
