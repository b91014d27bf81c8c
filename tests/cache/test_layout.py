"""How layers share pages."""

import pytest

from llmjax.cache.layout import KVLayout

FULL = None


def of(windows, max_model_len=4096, block_size=16):
    return KVLayout.of(windows, block_size=block_size, max_model_len=max_model_len)


def test_layers_that_see_all_share_a_page():
    layout = of([FULL] * 30)
    assert (layout.windows, layout.layers_per_page) == ((FULL,), 30)
    assert layout.places == tuple((0, i) for i in range(30))


def test_gemma_3_has_five_windows_for_each_full_group():
    layout = of(([512] * 5 + [FULL]) * 3)
    assert layout.layers_per_page == 3
    assert sorted(layout.windows, key=str) == [512] * 5 + [FULL]
    assert len(set(layout.places)) == 18
    for layer, (group, _) in enumerate(layout.places):
        assert layout.windows[group] == (FULL if layer % 6 == 5 else 512)


def test_a_window_as_long_as_the_context_is_none():
    assert of([512, FULL], max_model_len=512).windows == (FULL,)
    assert of([512, FULL], max_model_len=513).windows == (512, FULL)


def test_few_groups_even_where_counts_do_not_divide():
    layout = of([512] * 29 + [FULL] * 5)
    assert layout.num_groups <= 8
    assert layout.num_groups * layout.layers_per_page < 34 * 1.2
    assert len(set(layout.places)) == 34


def test_no_query_reads_before_the_first_block():
    layout = KVLayout(16, (FULL, 100))
    assert layout.first_block(0, 1000) == 0
    # A query at 1000 sees 901 on; keys are read from 896 on, the start of page 56.
    assert layout.first_block(1, 1000) == 56
    assert layout.first_block(1, 50) == 0


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_most_pages_bounds_what_a_sequence_holds(block_size, chunk):
    layout = KVLayout(block_size, (FULL, 40))
    for length in range(1, 400, 9):
        held = max(
            layout.num_blocks(min(start + chunk, length)) - layout.first_block(1, start)
            for start in range(0, length, chunk)
        )
        assert layout.most_pages(length, chunk) >= layout.num_blocks(length) + held
