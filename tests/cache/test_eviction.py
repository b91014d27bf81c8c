"""What a long sequence forgets: by position only, and never more than the budget allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.cache.eviction import Eviction
from llmjax.cache.layout import KEYS_AT_ONCE, KVLayout
from llmjax.errors import ConfigError

evictions = st.builds(
    lambda policy, size, blocks: Eviction.of(
        policy, size * blocks, block_size=size, windows=(None,), unit=KEYS_AT_ONCE
    ),
    st.sampled_from(["streaming", "snapkv"]),
    st.sampled_from([1, 2, 4, 16, 32]),
    st.integers(8, 200),
)


@settings(max_examples=200, deadline=None)
@given(evictions, st.integers(0, 50_000))
def test_what_has_left_is_a_matter_of_position(eviction, position):
    dropped, end = eviction.dropped(position), eviction.run_end(position)
    assert position < end, "a run goes on"
    assert dropped == eviction.dropped(end - 1) != eviction.dropped(end), "up to where tokens leave"
    assert position + 1 - dropped <= eviction.budget
    assert dropped % eviction.quantum == 0
    if dropped:
        assert position - dropped >= eviction.budget - eviction.quantum, "no more leaves than must"


@settings(max_examples=200, deadline=None)
@given(evictions)
def test_a_budget_is_shared_out(eviction):
    assert eviction.budget == eviction.kept + eviction.recent + eviction.quantum
    assert min(eviction.kept, eviction.recent, eviction.quantum) > 0
    assert eviction.looks_back <= eviction.quantum, "they all see the same"
    assert eviction.kept >= 4 or not eviction.selects


@pytest.mark.parametrize("policy", ["streaming", "snapkv"])
def test_windows_stay_whole(policy):
    def of(budget, windows):
        return Eviction.of(policy, budget, block_size=16, windows=windows, unit=64)

    assert of(1024, (None, 512)).quantum == 128
    assert of(576, (None, 512)).quantum == 64
    assert of(512, (None, 512)).quantum == 64, "a window as long as the budget is none"
    assert of(384, (None,)).quantum == 48
    with pytest.raises(ConfigError, match="kv_budget is 560, allowed: 576 or more"):
        of(560, (None, 512))


def test_a_layout_counts_no_more_than_the_budget():
    eviction = Eviction("streaming", budget=64, quantum=16, kept=16)
    layout = KVLayout.of((None, 32), block_size=16, max_model_len=4096, eviction=eviction)
    assert [layout.held_blocks(n) for n in (1, 64, 65, 80, 81, 4096)] == [1, 4, 5, 5, 5, 5]
    assert layout.most_pages(4096, 16) == layout.most_pages(200, 16)
    assert [layout.run_end(p, 200) for p in (0, 63, 64, 79, 190)] == [64, 64, 80, 80, 192]
    assert layout.run_end(190, 191) == 191
