import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.engine.buckets import Bucket, Buckets, Piece
from llmjax.errors import ConfigError


def make(config=None, compile_config=None, *, max_model_len=2048, block_size=16, ready=True):
    buckets = Buckets(
        config or SchedulerConfig(),
        compile_config or CompileConfig(),
        max_model_len=max_model_len,
        block_size=block_size,
    )
    if ready:
        for bucket in buckets.all:
            buckets.mark_ready(bucket)
    return buckets


def pairs(buckets, decode_only):
    return [(b.tokens, b.seqs) for b in buckets.all if b.decode_only == decode_only]


def test_default_ladder():
    buckets = make()
    assert [t for t, _ in pairs(buckets, True)] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert pairs(buckets, False) == [
        (32, 8),
        *[(128, 8), (128, 64)],
        *[(512, 8), (512, 64), (512, 256)],
        *[(2048, 8), (2048, 64), (2048, 256)],
        *[(8192, 64), (8192, 256)],
    ]
    assert {b.pages for b in buckets.all} == {128}
    assert buckets.max_tokens == 8192


def test_ladder_always_holds_max_num_seqs_and_stops_at_what_sequences_can_bring():
    buckets = make(SchedulerConfig(max_num_seqs=48), max_model_len=100)
    assert [t for t, _ in pairs(buckets, True)] == [1, 2, 4, 8, 16, 32, 48]
    assert max(pairs(buckets, False)) == (4800, 48)
    assert (2048, 8) not in pairs(buckets, False)
    assert {b.pages for b in buckets.all} == {7}
    chunked = make(SchedulerConfig(max_num_seqs=4, prefill_chunk_size=64))
    assert max(pairs(chunked, False)) == (256, 4)


@pytest.mark.parametrize("size", [1, 2, 8, 9])
def test_a_full_house_can_prefill_even_where_the_token_limit_is_the_sequence_limit(size):
    buckets = make(SchedulerConfig(max_num_seqs=size, max_num_batched_tokens=size))
    assert max(pairs(buckets, False)) == (size + 1, size)
    assert buckets.max_tokens == size
    assert buckets.max_seqs == size


def test_overrides():
    config = SchedulerConfig(max_num_seqs=64)
    buckets = make(
        config,
        CompileConfig(token_buckets=(1024, 16), seq_buckets=(64, 4), page_buckets=(128, 8)),
    )
    assert pairs(buckets, True) == [(4, 4)] * 2 + [(64, 64)] * 2
    assert pairs(buckets, False) == [(16, 4)] * 2 + [(1024, 4)] * 2 + [(1024, 64)] * 2
    assert [b.pages for b in buckets.all][:2] == [8, 128]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"seq_buckets": (8, 32)}, r"the largest is max_num_seqs \(64\)"),
        ({"seq_buckets": (8, 128)}, r"the largest is max_num_seqs \(64\)"),
        ({"token_buckets": (32, 64)}, "the largest of them from 65"),
        ({"token_buckets": (32, 9000)}, "to 8192"),
        ({"token_buckets": (8, 128)}, "values above 8"),
        ({"page_buckets": (8, 64)}, r"the largest holds max_model_len \(128 pages\)"),
    ],
)
def test_overrides_that_cannot_hold_what_is_allowed(override, message):
    with pytest.raises(ConfigError, match=message):
        make(SchedulerConfig(max_num_seqs=64), CompileConfig(**override))


def test_choose_takes_the_smallest_ready_one_that_fits():
    buckets = make(compile_config=CompileConfig(page_buckets=(16, 128)))
    assert buckets.choose(5, 5, True, 16) == Bucket(8, 8, 16)
    assert buckets.choose(5, 5, True, 17) == Bucket(8, 8, 128)
    assert buckets.choose(30, 5, False, 1) == Bucket(32, 8, 16)
    assert buckets.choose(30, 9, False, 1) == Bucket(128, 64, 16)
    assert buckets.choose(256, 256, True, 1) == Bucket(256, 256, 16)
    assert buckets.choose(8193, 1, False, 1) is None
    assert buckets.choose(1, 1, True, 129) is None


def test_what_is_not_ready_is_not_chosen():
    buckets = make(ready=False)
    assert buckets.choose(1, 1, True, 1) is None
    assert buckets.max_seqs == 0
    buckets.mark_ready(Bucket(8, 8, 128))
    assert buckets.choose(2, 1, False, 1) is None, "a decode program takes no chunks"
    assert buckets.max_seqs == 0, "no prefill without a mixed program"
    buckets.mark_ready(Bucket(128, 8, 128))
    assert buckets.choose(9, 8, False, 1) == Bucket(128, 8, 128)
    assert buckets.choose(3, 3, True, 1) == Bucket(8, 8, 128)
    assert buckets.max_seqs == 8
    with pytest.raises(ValueError, match="not one of"):
        buckets.mark_ready(Bucket(7, 8, 128))


def test_a_pair_opens_with_its_longest_pages():
    buckets = make(compile_config=CompileConfig(page_buckets=(16, 128)), ready=False)
    buckets.mark_ready(Bucket(128, 8, 16))
    assert buckets.max_seqs == 0
    buckets.mark_ready(Bucket(128, 8, 128))
    assert buckets.max_seqs == 8
    assert buckets.choose(100, 8, False, 16) == Bucket(128, 8, 16)


def cut(*tokens):
    return [Piece(t, whole=False) for t in tokens]


@pytest.mark.parametrize(
    ("decodes", "pieces", "counts"),
    [
        (0, cut(150), [128]),  # then 22 in 32
        (0, cut(22), [22]),
        (0, cut(128), [128]),
        (0, cut(500), [500]),  # 2% of 512 is padding
        (0, cut(400), [128]),  # 128, 128, 128, 16 in 32: less than 512
        (0, cut(440), [440]),  # four steps of 128 would be no less than 512
        (0, cut(512, 512), [512]),
        (0, cut(300, 300), [300, 212]),
        (8, cut(512), [504]),
        (40, cut(100), [88]),
        (60, cut(300), [300]),  # 68 a step would take five steps of 128
        (63, cut(1), [1]),
        (100, cut(40), [40]),  # 128 tokens hold at most 64 sequences
        (100, cut(*[1] * 60), [1] * 60),
        (0, cut(*[2] * 20), [2] * 20),  # 32 tokens hold 8 sequences only
    ],
)
def test_chunks_fill_the_bucket(decodes, pieces, counts):
    buckets = make()
    assert buckets.fill(decodes, pieces, 512) == counts


def test_fill_heeds_the_limit_and_what_is_ready():
    buckets = make()
    assert buckets.fill(10, cut(100), 20) == [20]
    assert buckets.fill(10, cut(100), 0) == []
    assert buckets.fill(0, [], 512) == []
    few = make(ready=False)
    assert few.fill(0, cut(10), 512) == []
    few.mark_ready(Bucket(128, 8, 128))
    assert few.fill(7, cut(500, 500), 512) == [121]
    assert few.fill(8, cut(500), 512) == []


def test_whole_pieces_are_not_cut():
    buckets = make()
    whole = [Piece(100, whole=True), Piece(100, whole=True)]
    assert buckets.fill(0, whole, 512) == [100, 100]
    assert buckets.fill(0, whole, 150) == [100]
    assert buckets.fill(0, whole, 99) == []


@given(
    st.integers(0, 255),
    st.lists(st.integers(1, 512), max_size=40),
    st.integers(0, 8192),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_padding_is_bounded_while_tokens_wait(decodes, sizes, limit, max_paddings):
    buckets = make(SchedulerConfig(max_paddings=max_paddings))
    counts = buckets.fill(decodes, cut(*sizes), limit)
    assert counts[:-1] == sizes[: max(0, len(counts) - 1)]
    assert all(0 < count <= size for count, size in zip(counts, sizes, strict=False))
    taken = sum(counts)
    assert taken <= limit
    assert counts or not sizes or not limit
    tokens = decodes + taken
    seqs = decodes + len(counts)
    bucket = buckets.choose(tokens, seqs, tokens == seqs, 1)
    if taken < min(limit, sum(sizes)) and len(counts) + decodes < bucket.seqs:
        assert bucket.tokens - tokens <= max_paddings * bucket.tokens


def test_compile_order_starts_with_what_lets_the_server_answer():
    buckets = make(compile_config=CompileConfig(page_buckets=(16, 128)), ready=False)
    first, rest = buckets.compile_order()
    assert first == [Bucket(128, 8, 128), Bucket(8, 8, 128)]
    assert sorted(first + rest) == list(buckets.all)
    assert rest[:5] == [
        Bucket(1, 1, 128),
        *[Bucket(512, 8, 128), Bucket(512, 64, 128)],
        *[Bucket(64, 64, 128), Bucket(512, 256, 128)],
    ]
    lengths = [b.pages for b in first + rest]
    assert lengths == sorted(lengths, reverse=True), "longest pages first"


@pytest.mark.parametrize("most", [1, 3, 8, 100])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_first_programs_serve_any_prompt(most, chunked):
    config = SchedulerConfig(max_num_seqs=most, enable_chunked_prefill=chunked)
    buckets = make(config, ready=False)
    for bucket in buckets.compile_order()[0]:
        buckets.mark_ready(bucket)
    assert buckets.max_seqs == min(most, 8)
    prompt = buckets.max_tokens if not chunked else 100
    assert buckets.fill(0, [Piece(prompt, whole=True)], prompt) == [prompt]


def test_table_names_every_program():
    text = make().table()
    assert text.startswith("20 step programs")
    assert "T = S: 1 2 4 8 16 32 64 128 256" in text
    assert "T 512: S 8 64 256" in text
    assert "P: 128" in text


def test_programs_may_become_ready_on_several_threads():
    buckets = make(ready=False)
    threads = [
        threading.Thread(target=buckets.mark_ready, args=(bucket,)) for bucket in buckets.all
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buckets.ready == buckets.all
