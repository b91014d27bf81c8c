import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.cache.block_pool import BlockPool


def test_pages_are_handed_out_once_and_counted():
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    pool.free(first)
    assert (pool.num_free, pool.num_used) == (3, 1)


def test_too_many_takes_nothing():
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(0) == []


def test_double_free_and_foreign_pages_raise():
    pool = BlockPool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(RuntimeError, match="freed while it is free"):
        pool.free(pages[:1])
    for foreign in (4, -1):
        with pytest.raises(RuntimeError, match="the pool has 0 to 3"):
            pool.free([foreign])
    assert pool.num_free == 4


def test_sizes_out_of_range():
    with pytest.raises(ValueError, match="1 or more"):
        BlockPool(0)
    with pytest.raises(ValueError, match="0 or more"):
        BlockPool(1).allocate(-1)


@given(st.lists(st.integers(-5, 5)))
def test_no_page_has_two_owners(sizes):
    pool, held = BlockPool(16), []
    for size in sizes:
        if size >= 0:
            pages = pool.allocate(size)
            held += pages or []
            assert (pages is None) == (size > pool.num_free and pages is None)
        else:
            back, held = held[:-size], held[-size:]
            pool.free(back)
        assert len(set(held)) == len(held) == pool.num_used == 16 - pool.num_free
