"""The page accounts, one rule each; tests/engine has random loads over them."""

import pytest

from llmjax.cache.balance import check_balance
from llmjax.cache.block_pool import BlockPool
from llmjax.cache.eviction import Eviction
from llmjax.cache.host_pool import HostPool, MoveCosts
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import GONE, KVCache
from llmjax.cache.page_store import Copy, Load, Save
from llmjax.request import FinishReason, Request, SamplingParams, Sequence

CHEAP, DEAR = MoveCosts(0.1, 0.1, 1), MoveCosts(9, 9, 1)


class Book:
    """A cache, and sequences that run to the end of their tokens at once."""

    def __init__(self, num_blocks=32, windows=(None,), host=None, eviction=None, **options):
        layout = KVLayout(4, windows, eviction=eviction)
        self.cache = KVCache(BlockPool(num_blocks), layout, host=host, **options)
        self.running = []

    def start(self, tokens, *, id="r", index=0, prompt_len=None, **params):
        request = Request(id, list(tokens[:prompt_len]), SamplingParams(**params))
        seq = Sequence(request, index, 0, list(tokens))
        return seq if self.resume(seq) else None

    def resume(self, seq):
        match = self.cache.match(seq)
        if match.owner is not None or not self.cache.admit(seq, match):
            return False
        self.running.append(seq)
        self.check()
        return True

    def compute(self, seq, count=None):
        start = seq.num_computed
        end = len(seq.tokens) if count is None else start + count
        assert self.cache.extend(seq, start, end)
        seq.num_computed = end
        self.cache.advance(seq)
        self.check()

    def end(self, seq, *, wants_back=False):
        self.running.remove(seq)
        seq.finish_reason = None if wants_back else FinishReason.STOP
        self.cache.release(seq, wants_back=wants_back)
        if not wants_back:
            alive = any(s.request.id == seq.request.id for s in self.running)
            self.cache.forget(seq, is_last=not alive)
        self.check()

    def whole(self, tokens, **params):
        seq = self.start(tokens, **params)
        self.compute(seq)
        self.end(seq)
        return seq

    def check(self):
        check_balance(self.cache, self.running)


def test_pages_are_shared_and_counted_once():
    book = Book()
    first = book.start(range(10))
    book.compute(first)
    second = book.start([*range(8), 77, 78])
    assert second.num_computed == 8
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    assert book.cache.num_used == 4


def test_the_last_token_is_computed_in_any_case():
    book = Book()
    book.whole(range(8))
    seq = book.start(range(8))
    # The second page is copied up to its last token, which is computed into the copy.
    assert seq.num_computed == 7
    (copy,) = book.cache.take_transfers()
    assert copy.target == seq.block_tables[0][1] != copy.source


def test_a_branch_within_a_page_takes_a_copy():
    book = Book()
    first = book.whole(range(12))
    seq = book.start([*range(10), 50, 51, 52])
    assert seq.num_computed == 10
    (copy,) = book.cache.take_transfers()
    assert isinstance(copy, Copy) and copy.target == seq.block_tables[0][2]
    assert first.num_cached_tokens == 0 and seq.num_cached_tokens == 10


def test_choices_of_a_request_wait_for_the_first_and_share_its_prompt():
    book = Book(enable_prefix_caching=False)
    first = book.start(range(10), n=3)
    assert book.start(range(10), n=3, index=1) is None, "the prompt is being computed"
    book.compute(first)
    others = [book.start(range(10), n=3, index=i) for i in (1, 2)]
    assert [seq.num_computed for seq in others] == [9, 9]
    assert book.cache.num_used == 2 + 3
    for seq in (first, *others):
        book.end(seq)
    assert book.cache.pool.num_free == 32, "nothing is remembered where caching is off"


def test_one_that_begins_alike_waits_for_what_is_being_computed():
    book = Book()
    first = book.start(range(40))
    book.compute(first, 16)
    assert book.start([*range(40), 99]) is None
    assert book.start([*range(14), 99]).num_computed == 14
    book.compute(first)
    assert book.start([*range(40), 99]).num_computed == 40


def test_what_was_never_computed_is_not_remembered():
    book = Book()
    first = book.start(range(40))
    book.compute(first, 6)
    book.end(first)
    assert book.start(range(40)).num_computed == 6


def test_output_is_remembered_too():
    book = Book()
    book.whole(range(30), prompt_len=5)
    assert book.start([*range(30), 5]).num_computed == 30


def test_the_page_let_go_longest_ago_makes_room_the_last_of_a_sequence_first():
    book = Book(num_blocks=8)
    book.whole(range(100, 116))
    book.whole(range(200, 216))
    seq = book.start(range(300, 308))
    assert book.cache.stats.evicted == 2
    book.end(seq)
    assert book.start([*range(200, 216), 1]).num_computed == 16
    assert book.cache.match(Sequence(seq.request, 0, 0, [*range(100, 116), 1])).num_tokens == 8


def test_keys_keep_apart():
    book = Book()
    book.whole(range(12))
    request = Request("other", list(range(12)), SamplingParams(), kv_key="salt")
    assert book.cache.match(Sequence(request, 0, 0, list(range(12)))).num_tokens == 0


def test_prompt_logprobs_need_the_prompt_computed():
    book = Book()
    book.whole(range(12))
    assert book.start(range(12), prompt_logprobs=0).num_computed == 0


def test_a_window_gives_back_what_it_has_passed():
    book = Book(num_blocks=400, windows=(None, 8))
    seq = book.start(range(300), prompt_len=10)
    while seq.num_computed < 300:
        book.compute(seq, 20)
    full, window = seq.block_tables
    assert GONE not in full and window.count(GONE) > 40
    held = len(full) + len(window) - window.count(GONE)
    assert book.cache.num_used == held
    # What lies behind is remembered until the room is needed.
    assert book.start([*range(300), 5]).num_computed == 300


def test_without_its_window_a_prefix_is_used_up_to_where_it_is_whole():
    book = Book(num_blocks=240, windows=(None, 8))
    book.whole(range(300))
    for start in range(1000, 3000, 40):
        book.whole(range(start, start + 40))
    assert book.cache.stats.evicted > 60
    tokens = [*range(301)]
    match = book.cache.match(Sequence(Request("x", tokens, SamplingParams()), 0, 0, tokens))
    for group in range(2):
        first = book.cache.layout.first_block(group, match.num_tokens)
        assert all(node.entries[group].page is not None for node in match.nodes[first:])


@pytest.mark.parametrize(
    ("windows", "eviction"), [((None, 8), None), ((None,), Eviction("snapkv", 20, 4, 12))]
)
def test_steps_ahead_leave_the_end_of_a_prompt_behind(windows, eviction):
    """What was given back before the host has seen a token is not remembered as one's own."""
    book = Book(num_blocks=400, windows=windows, eviction=eviction)
    prompt = range(62 if eviction is None else 14)
    seq = book.start(prompt)
    book.compute(seq)
    while seq.num_computed < len(prompt) + 80:
        book.compute(seq, 2)
    assert seq.block_tables[-1][len(prompt) // 4] == GONE
    book.whole(prompt)
    seq.tokens += range(80)
    book.compute(seq, 2)
    book.end(seq)
    assert book.cache.num_used == 0


def test_preempted_pages_go_to_the_host_and_come_back():
    host = HostPool(16, 0, CHEAP)
    book = Book(num_blocks=8, host=host)
    first = book.start(range(14), prompt_len=10)
    book.compute(first)
    book.end(first, wants_back=True)
    second = book.start(range(100, 128))
    saves = book.cache.take_transfers()
    assert [type(s) for s in saves] == [Save] * 3 and host.num_used == 3
    book.end(second)
    first.num_computed = 0
    assert book.resume(first) and first.num_computed == 13
    loads = [t for t in book.cache.take_transfers() if isinstance(t, Load)]
    assert len(loads) == host.num_loaded == 3 and host.num_used == 0


@pytest.mark.parametrize(("costs", "saved"), [(CHEAP, True), (DEAR, False)])
def test_moving_is_chosen_where_it_takes_less_than_computing(costs, saved):
    host = HostPool(16, 0, costs)
    book = Book(num_blocks=8, host=host)
    first = book.start(range(14))
    book.compute(first)
    book.end(first, wants_back=True)
    book.start(range(100, 128))
    assert (host.num_saved > 0) == saved


def test_of_the_cache_only_what_is_likely_to_be_wanted_is_kept_on_the_host():
    host = HostPool(16, 8, MoveCosts(1, 1, 1))
    book = Book(num_blocks=8, host=host)
    book.whole(range(16))
    book.whole(range(100, 128))
    assert host.num_saved == 0, "nothing has been wanted twice so far"
    for _ in range(20):
        book.whole(range(100, 128))
    book.whole(range(200, 228))
    assert 0 < host.num_used <= 8
    assert book.start([*range(100, 128), 1]).num_computed > 0


def test_a_mistake_in_the_accounts_is_seen():
    book = Book()
    seq = book.start(range(10))
    book.compute(seq)
    book.cache.ways[seq].path[0].entries[0].refs += 1
    with pytest.raises(RuntimeError, match="references"):
        book.check()
