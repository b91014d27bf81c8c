"""A model in stages says what it says in one piece, and what does not go with stages is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from llmjax.cache.layout import KVLayout
from llmjax.config import EngineConfig
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
    "num_gpu_blocks_override": 22,
    "forecast_margin": None,
    "swap_space": 0.1,
}


def in_stages(model: Path, sizes: list[tuple[int, int]], *, kept: bool = False) -> list[dict]:
    """What tests/parallel/run_pipeline.py says of so many stages of so many devices.

    Args:
        kept: weights that are quantised stay so, as where Triton serves.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 250) for _ in range(n)] for n in (19, 25, 30, 40, 7, 9)]
    asked = (str(model), sizes, OPTIONS, prompts, kept)
    return on_virtual_devices("run_pipeline.py", *asked)


def assert_same(one: dict, other: dict) -> None:
    assert other["tokens"] == one["tokens"] and other["chosen"] == one["chosen"] != ""
    for ours, theirs in zip(other["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_stages_say_what_one_piece_says(tiny_model):
    one, *more = in_stages(tiny_model, [(1, 1), (2, 1), (2, 2)])
    assert one["preemptions"] and one["loaded"]
    for found in more:
        assert_same(one, found)
        assert found["preemptions"] and found["loaded"]
        assert "LLM.forward: 1" in found["refused"]
    two, spread = more
    # A layer each; the embedding is in both, as it is the head too.
    assert two["weights"] == two["pages"] == [[0], [1]] and two["history"] == [1]
    assert spread["weights"] == spread["pages"] == [[0, 1], [2, 3]]
    assert spread["history"] == [2, 3]


def test_stages_forget_what_one_piece_forgets(tiny_model):
    prompts = [[random.Random(n).randrange(3, 250) for _ in range(n)] for n in (19, 33, 50)]
    options = OPTIONS | {"kv_eviction": "snapkv", "kv_budget": 32}
    asked = (str(tiny_model), [(1, 1), (2, 2)], options, prompts, False)
    one, found = on_virtual_devices("run_pipeline.py", *asked)
    assert min(one["evictions"], found["evictions"]) > 3
    assert found["tokens"] == one["tokens"]
    for ours, theirs in zip(found["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_pages_of_a_stage_hold_what_its_layers_keep():
    windows = [32, 32, None, 32, 32, None, 32]
    layout = KVLayout.of(windows, block_size=16, max_model_len=256)
    for layers in (range(3), range(3, 5), range(5, 7)):
        stage = layout.stage(layers)
        assert stage.windows == layout.windows and stage.num_groups == layout.num_groups
        kept = [stage.places[i] for i in layers]
        assert [group for group, _ in kept] == [layout.places[i][0] for i in layers]
        assert len(set(kept)) == len(layers)
        assert {at for _, at in kept} == set(range(stage.layers_per_page))
    plain = KVLayout.of([None] * 6, block_size=16, max_model_len=256)
    assert [plain.stage(some).layers_per_page for some in (range(4), range(4, 6))] == [4, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 2}, "pipeline_parallel_size is 2, .* data_parallel_size of 2: 1"),
        ({"prefill_from": ("memory",)}, "prefill_from is .* pipeline_parallel_size of 2: none"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of("m", pipeline_parallel_size=2, **options)
