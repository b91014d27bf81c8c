"""Heads and channels are dealt out whole: each once, the heads with what they attend to."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmjax.parallel.partition import Sizes, partition

sizes = st.builds(
    lambda group, kv, dim, mlp: Sizes(group * kv, kv, dim, mlp),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 40),
)


def sources(part, sizes, axis):
    heads = sizes.num_heads
    count = {"heads": heads, "queries": heads, "kv_heads": sizes.num_kv_heads}
    plain = np.arange(count[axis] * sizes.head_dim if axis in count else sizes.mlp_size)
    return part.sources.get(axis, plain)


@given(sizes, st.integers(1, 16))
def test_every_device_gets_as_much_and_every_head_is_there_once(sizes, devices):
    part = partition(sizes, devices)
    divided, group = part.sizes, sizes.num_heads // sizes.num_kv_heads
    assert divided.head_dim == sizes.head_dim
    for count in (divided.num_heads, divided.num_kv_heads, divided.mlp_size):
        assert count % devices == 0
    heads = sources(part, sizes, "heads").reshape(-1, sizes.head_dim)
    kv_heads = sources(part, sizes, "kv_heads").reshape(-1, sizes.head_dim)
    mlp = sources(part, sizes, "mlp")
    assert len(heads) == divided.num_heads and len(kv_heads) == divided.num_kv_heads
    assert sorted(mlp[mlp >= 0]) == list(range(sizes.mlp_size))
    # Channels of a head stay together and in order.
    for rows in (heads, kv_heads):
        first = rows[:, :1]
        np.testing.assert_array_equal(
            rows, np.where(first < 0, -1, first + np.arange(sizes.head_dim))
        )
    real = heads[heads[:, 0] >= 0, 0] // sizes.head_dim
    assert sorted(real) == list(range(sizes.num_heads))
    # Each query head reads the key-value head of its group, and those that are added are such.
    share = divided.num_heads // divided.num_kv_heads
    queries = sources(part, sizes, "queries").reshape(-1, sizes.head_dim)
    np.testing.assert_array_equal(queries[heads >= 0], heads[heads >= 0])
    for place, head in enumerate(queries[:, 0]):
        kv_head = kv_heads[place // share, 0]
        assert kv_head < 0 or kv_head // sizes.head_dim == head // sizes.head_dim // group


@given(sizes)
def test_one_device_changes_nothing(sizes):
    part = partition(sizes, 1)
    assert part.sizes == sizes and not part.sources


def test_what_divides_stays_as_it_is():
    llama = Sizes(64, 8, 128, 28672)
    assert partition(llama, 8) == (llama, {}, 1)


def test_smollm2_over_eight():
    """3 key-value heads twice each, and 2 places of zeros; 9 query heads in 16."""
    part = partition(Sizes(9, 3, 64, 1536), 8)
    assert part.sizes == Sizes(16, 8, 64, 1536) and part.kv_copies == 2
    heads = part.sources["heads"][::64]
    np.testing.assert_array_equal(
        np.where(heads < 0, -1, heads // 64),
        [0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, -1, -1, -1, -1],
    )
