"""Replicas say what one engine says, each request where its prefix is, and nothing is left over."""

from __future__ import annotations

import random

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
    "num_gpu_blocks_override": 60,
    "forecast_margin": None,
    "swap_space": 0.1,
    "seed": 5,
}


@pytest.fixture(scope="module")
def said(tiny_model):
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 250) for _ in range(n)] for n in (19, 25, 30, 40, 7, 3)]
    return on_virtual_devices("run_data_parallel.py", str(tiny_model), OPTIONS, prompts)


def test_tokens_are_those_of_one_engine(said):
    offline, online = said["offline"], said["online"]
    assert set(offline["two"]["engines"]) == set(offline["two_by_two"]["engines"]) == {0, 1}
    for name in ("two", "two_by_two"):
        assert offline[name]["tokens"] == offline["one"]["tokens"]
    assert [[tokens] for tokens, _ in online["served"]] == offline["one"]["tokens"]
    assert {number for _, number in online["served"]} == {0, 1}
    assert offline["two_sampled"]["tokens"] == offline["one_sampled"]["tokens"]
    assert all(len(choices) == 3 for choices in offline["two_sampled"]["tokens"])


def test_each_has_devices_of_its_own_and_they_run_at_once(said):
    offline = said["offline"]
    assert offline["weights"] == offline["pages"] == [[0], [1]]
    assert offline["spread"] == [[0, 1], [2, 3]]
    assert offline["at_once"] == 2


def test_requests_land_where_their_prefix_is(said):
    stems = said["offline"]["stems"]
    first = [told["engines"][0] for told in stems[:2]]
    assert sorted(first) == [0, 1]
    assert [told["engines"][0] for told in stems] == first * 4
    assert [told["cached"][0] for told in stems] == [0, 0, *[32] * 6]


def test_ends_of_all_kinds_reach_the_right_one(said):
    offline, online = said["offline"], said["online"]
    assert offline["idle"] and online["idle"]
    assert offline["late"] == [[]] and online["late"]
    assert offline["refused"] == "5 requests wait already (max_queue_len)" and offline["five"] == 5
    assert online["cut_off"] == 0 and online["ends"] == [40, 40, 40]


def test_each_is_told_of(said):
    online = said["online"]
    assert online["snapshots"] == online["running"] == [2, 2]
    assert min(online["steps"]) > 0 and sum(online["steps"]) == online["all_steps"]


def test_more_than_there_are(tiny_model):
    with pytest.raises(
        ConfigError, match="data_parallel_size is 64 times tensor_parallel_size is 2"
    ):
        LLM(str(tiny_model), data_parallel_size=64, tensor_parallel_size=2)
