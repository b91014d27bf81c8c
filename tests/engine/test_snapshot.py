"""What a snapshot shows of an engine is what its books say, and no more than fits a page."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from llmjax import LLM, SamplingParams
from llmjax.cache.block_pool import BlockPool
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import KVCache
from llmjax.engine import snapshot
from llmjax.engine.snapshot import CACHED, FREE, OWNED, SHARED, page_map, prefix_tree, take_snapshot
from llmjax.request import Request, Sequence

SIZES = {
    "block_size": 4,
    "max_num_seqs": 8,
    "token_buckets": (16, 64),
    "seq_buckets": (8,),
    "max_model_len": 96,
    "background": False,
}


@pytest.fixture(scope="module", params=["tiny_model", "windowed_model"])
def llm(request):
    model = request.getfixturevalue(request.param)
    pages = 120 if request.param == "tiny_model" else 700
    with LLM(str(model), num_gpu_blocks_override=pages, **SIZES) as llm:
        yield llm


def test_every_page_is_counted_once_at_every_step(llm):
    engine, rng = llm.engine, random.Random(2)
    start = [rng.randrange(3, 250) for _ in range(20)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2)
    for i in range(14):
        prompt = start + [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))]
        engine.add(Request(str(i), prompt, params))
    most_waiting = seen_shared = 0
    while engine.has_work:
        engine.step()
        told = take_snapshot(engine)
        stats = told["stats"]
        assert json.loads(json.dumps(told)) == told
        cells = Counter(told["pages"]["cells"])
        assert told["pages"]["size"] == 1 and cells.total() == told["num_pages"]
        assert (cells[FREE], cells[CACHED]) == (stats["pages_free"], stats["pages_cached"])
        assert cells.total() - cells[FREE] - cells[CACHED] == stats["pages_used"]
        for place, seq in enumerate(told["running"]):
            assert cells[OWNED + place] <= seq["pages"]
            assert 0 <= seq["computed"] <= seq["prompt_tokens"] <= 50
            assert 0 <= seq["output_tokens"] <= 12 and seq["age"] >= 0
        assert max(cells) < OWNED + len(told["running"])
        assert len(told["running"]) == stats["num_running"]
        assert len(told["waiting"]) == stats["num_waiting"]
        most_waiting = max(most_waiting, len(told["waiting"]))
        seen_shared += cells[SHARED]
    assert most_waiting > 10 and seen_shared
    engine.scheduler.check_balance()


def keys_of(told):
    """Every key of nested JSON."""
    if isinstance(told, dict):
        return {*told, *(key for value in told.values() for key in keys_of(value))}
    return {key for value in told for key in keys_of(value)} if isinstance(told, list) else set()


def test_no_token_of_a_prompt_is_told(llm):
    engine = llm.engine
    engine.add(Request("x", [201, 202, 203, 204] * 8, SamplingParams(max_tokens=4)))
    engine.step()
    told = take_snapshot(engine)
    assert len(told["running"]) == 1 and told["tree"]
    hidden = {"prompt", "text", "token_ids", "prompt_token_ids", "cache_salt", "user"}
    assert not keys_of(told) & hidden
    numbers = [value for seq in told["running"] for value in seq.values()]
    assert not {201, 202, 203, 204} & set(numbers)
    while engine.has_work:
        engine.step()


class Tree:
    """A prefix cache in which sequences come and go."""

    def __init__(self, pages=2000):
        self.cache = KVCache(BlockPool(pages), KVLayout(4))

    def run(self, tokens, keep=False):
        tokens = list(tokens)
        seq = Sequence(Request(str(id(tokens)), tokens, SamplingParams(), kv_key="k"), 0, 0, tokens)
        assert self.cache.admit(seq, self.cache.match(seq))
        seq.num_computed = len(tokens)
        self.cache.advance(seq)
        if not keep:
            self.cache.release(seq)
            self.cache.forget(seq, is_last=True)
        return seq


def test_the_tree_shows_runs_without_a_fork_by_their_hits():
    tree = Tree()
    system = range(100, 140)
    for i in range(5):
        tree.run([*system, *range(1000 * i, 1000 * i + 21)], keep=i == 4)
    tree.run(range(500, 513))
    (root,) = prefix_tree(tree.cache)
    assert (root["hits"], root["tokens"], root["running"], root["more"]) == (6, 0, 1, 0)
    shared, other = root["children"]
    assert (shared["tokens"], shared["nodes"], shared["hits"]) == (40, 10, 4)
    assert shared["running"] == 1 and shared["device"] == 10 and shared["host"] == 0
    assert (other["tokens"], other["hits"], other["children"]) == (13, 0, [])
    assert len(shared["children"]) == 5
    assert Counter(child["running"] for child in shared["children"]) == {0: 4, 1: 1}
    assert len({node["key"] for node in (root, shared, other, *shared["children"])}) == 8


def test_a_large_tree_is_cut(monkeypatch):
    tree = Tree()
    for i in range(60):
        tree.run([7] * 4 + [i] * 8)
    (root,) = prefix_tree(tree.cache)
    (shared,) = root["children"]
    assert len(shared["children"]) == 12 and shared["more"] == 48
    monkeypatch.setattr(snapshot, "MOST_BRANCHES", 5)
    (root,) = prefix_tree(tree.cache)
    assert len(root["children"][0]["children"]) == 3 and root["children"][0]["more"] == 57
    monkeypatch.setattr(snapshot, "MOST_VISITED", 4)
    tree = Tree()
    tree.run(range(400))
    (root,) = prefix_tree(tree.cache)
    (run,) = root["children"]
    assert run["nodes"] == 3 and run["cut"] and run["more"] == 1


@pytest.mark.parametrize("most", [1, 7, 64, 999])
def test_a_cell_of_many_pages_says_what_most_of_them_are(monkeypatch, most):
    tree = Tree(pages=1000)
    tree.run(range(1000))  # 250 pages
    running = [tree.run(range(2000 * i, 2000 * i + 600), keep=True) for i in (1, 2, 3)]
    monkeypatch.setattr(snapshot, "MOST_CELLS", 10**6)
    pages = page_map(tree.cache, running)["cells"]
    assert Counter(pages) == {CACHED: 250, OWNED: 150, OWNED + 1: 150, OWNED + 2: 150, FREE: 300}
    monkeypatch.setattr(snapshot, "MOST_CELLS", most)
    told = page_map(tree.cache, running)
    size, cells = told["size"], told["cells"]
    assert len(cells) <= most and len(cells) == -(-1000 // size)
    for i, cell in enumerate(cells):
        part = pages[i * size : (i + 1) * size]
        count = Counter("used" if page >= SHARED else page for page in part)
        kind = "used" if cell >= SHARED else cell
        assert count[kind] == max(count.values())
        assert kind != "used" or cell in part


def test_beyond_what_is_listed_pages_count_as_shared():
    tree = Tree(pages=100)
    running = [tree.run(range(1000 * i, 1000 * i + 40), keep=True) for i in range(1, 4)]
    cells = Counter(page_map(tree.cache, running[:1])["cells"])
    assert cells == {OWNED: 10, SHARED: 20, FREE: 70}
