"""A model spread over virtual devices says the same as on one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from llmjax import LLM
from llmjax.errors import ConfigError

from .virtual import on_virtual_devices

OPTIONS = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "token_buckets": [16],
    "seq_buckets": [4],
    "prefill_chunk_size": 16,
    "max_num_batched_tokens": 16,
    "forecast_margin": None,
    "swap_space": 0.1,
}


def spread(model: Path, sizes: list[int], *, kept: bool = False, **options: object) -> list[dict]:
    """What tests/parallel/run_parallel.py says of each number of devices.

    Args:
        kept: weights that are quantised stay so, as where Triton serves.
    """
    rng = random.Random(0)
    shared = [rng.randrange(3, 250) for _ in range(18)]
    prompts = [shared + [rng.randrange(3, 250) for _ in range(n)] for n in (1, 7, 12, 20, 5, 9)]
    asked = (str(model), sizes, OPTIONS | options, prompts, kept)
    return on_virtual_devices("run_parallel.py", *asked)


def assert_same(one: dict, other: dict) -> None:
    assert other["tokens"] == one["tokens"]
    for ours, theirs in zip(other["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    np.testing.assert_allclose(other["prompt_logprobs"], one["prompt_logprobs"], atol=1e-4)
    assert one["prompt_logprobs"]


def test_any_number_of_devices(make_model):
    """3 query heads of one key-value head: copied, and filled up with zeros."""
    model = make_model("smollm2")
    sizes = [1, 2, 3, 8]
    one, *more = spread(model, sizes, num_gpu_blocks_override=26)
    assert one["preemptions"] and one["hits"]
    for size, found in zip(sizes[1:], more, strict=True):
        assert_same(one, found)
        assert found["preemptions"] and found["hits"]
        assert found["pages_of_one"] * size == found["pages"]
        # Norms are on every device, and the vocabulary of 320 where 3 divide it not.
        assert found["weights_of_one"] < 0.62 * found["weights"]
        assert found["aliased"] >= found["pages_of_one"]
        # One after attention and one after the feed-forward of each of two layers; one for the
        # embedding, where the vocabulary is divided.
        divided = 320 % size == 0
        assert (found["all_reduces"], found["all_gathers"]) == (4 + divided, 0)


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("gemma3", [1, 2, 4], {"num_gpu_blocks_override": 120}),
        (
            "qwen2",
            [1, 3],
            {
                "num_gpu_blocks_override": 26,
                "kv_cache_dtype": "int8",
                "kv_eviction": "streaming",
                "kv_budget": 32,
            },
        ),
        ("olmo2", [1, 2], {"num_gpu_blocks_override": 26}),
    ],
)
def test_families(make_model, family, sizes, options):
    """Windows, biases, 8-bit pages, sinks that are moved, and norms over all heads."""
    one, *more = spread(make_model(family), sizes, **options)
    assert (one["evictions"] > 3) == ("kv_eviction" in options)
    for found in more:
        assert_same(one, found)


def test_copies_of_a_head_keep_the_same(make_model):
    """What stays is chosen by all queries of a key-value head, on whichever devices they are."""
    options = {"kv_eviction": "snapkv", "kv_budget": 32, "num_gpu_blocks_override": 26}
    one, *more = spread(make_model("smollm2"), [1, 2, 6], **options)
    assert one["evictions"] > 3
    for found in more:
        assert_same(one, found)
        assert found["evictions"] > 3


def test_norms_over_all_heads_do_not_take_copies(make_model):
    model = make_model("olmo2")
    with pytest.raises(AssertionError, match="tensor_parallel_size is 8, allowed for Olmo2"):
        spread(model, [8], num_gpu_blocks_override=26)


def test_more_than_there_are(tiny_model):
    with pytest.raises(ConfigError, match="tensor_parallel_size is 64, allowed: up to "):
        LLM(str(tiny_model), tensor_parallel_size=64)
