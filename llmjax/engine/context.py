"""How long a sequence may get, and how much of it a step takes. No jax."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from ..cache.eviction import Eviction
from ..cache.layout import KEYS_AT_ONCE, KVLayout
from ..config import CacheConfig, SchedulerConfig
from ..errors import ConfigError

DEVICE_SHARE, HOST_SHARE = 0.9, 0.2
"""Of memory, where `gpu_memory_utilization` does not say: an accelerator's, and a host's."""


class Widths(Protocol):
    """What a model's temporaries depend on."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_size(self) -> int: ...


def make_layout(cache: CacheConfig, windows: Sequence[int | None], max_model_len: int) -> KVLayout:
    """How layers share pages, and what sequences of up to `max_model_len` tokens forget.

    Raises:
        ConfigError: the budget does not hold the windows.
    """
    size, eviction = cache.block_size, None
    if cache.kv_eviction is not None and cache.most_kept < max_model_len:
        eviction = Eviction.of(
            cache.kv_eviction,
            cache.most_kept,
            block_size=size,
            windows=windows,
            unit=max(KEYS_AT_ONCE, size),
        )
    return KVLayout.of(windows, block_size=size, max_model_len=max_model_len, eviction=eviction)


def most_chunk(scheduler: SchedulerConfig, max_model_len: int) -> int:
    """Most tokens of one sequence in a step."""
    most = min(scheduler.max_num_batched_tokens, max_model_len)
    return min(most, scheduler.prefill_chunk_size) if scheduler.enable_chunked_prefill else most


def fit_context(
    asked: int | None, own: int, pages: int, layout: KVLayout, scheduler: SchedulerConfig
) -> int:
    """The most tokens of a sequence that `pages` hold.

    A `max_model_len` that was asked for is kept or refused, as vLLM does. The model's own is
    lowered to what there is room for, but not below what one sequence brings to one step.

    Raises:
        ConfigError: the pages do not hold that; carries the numbers.
    """

    own = max(own, asked or 0)  # more than its own only where it forgets

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


def step_bytes(scheduler: SchedulerConfig, config: Widths, max_model_len: int) -> int:
    """An estimate of the largest step's temporaries: float32 logits, and activations."""
    logits = 4 * scheduler.max_num_seqs * config.vocab_size * 4
    tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_model_len)
    width = 4 * config.hidden_size + 3 * config.mlp_size + 4 * config.num_heads * config.head_dim
    return logits + 4 * tokens * width
