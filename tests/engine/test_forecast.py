"""What the forecast of outputs is worth: preemptions under load, and memory in use."""

import math
import random
from collections import deque

import numpy as np
import pytest

from llmjax.cache.block_pool import BlockPool
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import KVCache
from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.engine.buckets import Buckets
from llmjax.engine.forecast import Forecast, Lengths
from llmjax.engine.scheduler import Scheduler
from llmjax.request import Request, SamplingParams, Sequence

EOS = 0


class Server:
    """A scheduler whose outputs have lengths that are known to the test only."""

    def __init__(self, num_pages, max_model_len=2048, max_num_seqs=64, **config):
        self.config = SchedulerConfig(max_num_seqs=max_num_seqs, **config)
        sizes = CompileConfig(token_buckets=(128, 640), seq_buckets=(max_num_seqs,))
        buckets = Buckets(self.config, sizes, max_model_len=max_model_len, block_size=16)
        for bucket in buckets.all:
            buckets.mark_ready(bucket)
        self.cache = KVCache(BlockPool(num_pages), KVLayout(16), enable_prefix_caching=False)
        self.scheduler = Scheduler(self.config, buckets, self.cache, max_model_len=max_model_len)
        self.length: dict[str, int] = {}

    def add(self, prompt_len, length, **params):
        id = str(len(self.length))
        prompt = [len(self.length) + 1, *[1] * (prompt_len - 1)]
        request = Request(id, prompt, SamplingParams(**params), frozenset({EOS}))
        self.scheduler.add(Sequence(request, 0, 0, list(prompt)))
        self.length[id] = length

    def run(self):
        """Preemptions, and the mean share of pages in use while any request waits."""
        in_flight, shares = deque(), []
        while self.scheduler.has_work:
            if (plan := self.scheduler.schedule()) is not None:
                in_flight.append(plan)
            if self.scheduler.num_waiting:
                shares.append(self.cache.num_used / self.cache.pool.num_blocks)
            if len(in_flight) == 2 or plan is None:
                done = in_flight.popleft()
                self.scheduler.commit(done, [[self._token(chunk)] for chunk in done.chunks])
        return self.scheduler.num_preemptions, float(np.mean(shares))

    def _token(self, chunk):
        seq = chunk.seq
        return EOS if seq.output_len + 1 >= self.length[seq.request.id] else 2


def chats(rng):
    """Answers of all lengths, most of them short."""
    return {"prompt_len": rng.randint(20, 300), "length": int(rng.lognormvariate(4.8, 0.9)) + 1}


def code(rng):
    """Short questions, long answers."""
    return {"prompt_len": rng.randint(10, 60), "length": int(rng.gauss(500, 120).__abs__()) + 1}


def capped(rng):
    """Answers that their max_tokens ends."""
    size = rng.choice([50, 200, 400])
    return {"prompt_len": rng.randint(10, 200), "length": 10**6, "max_tokens": size}


def load(kind, margin, count=300, **config):
    rng = random.Random(0)
    server = Server(500, forecast_margin=margin, **config)
    for _ in range(count):
        params = {"max_tokens": None, **kind(rng)}
        server.add(**params)
    preemptions, used = server.run()
    return 1000 * preemptions / count, used


@pytest.mark.parametrize(
    ("kind", "most", "least_used"), [(chats, 80, 0.93), (code, 250, 0.82), (capped, 100, 0.82)]
)
def test_preemptions_stay_rare_and_memory_full(kind, most, least_used):
    """Per 1,000 requests, in a pool that holds 20 to 30 of them."""
    before, _ = load(kind, None)
    preemptions, used = load(kind, 1.5)
    assert preemptions <= most < 400 < before
    assert used >= least_used


def test_what_outputs_are_like_is_learnt():
    lengths = Lengths()

    def chance(now, later):
        return float(lengths.survival(np.array(now), np.array(later)))

    assert chance(0, 256) == pytest.approx(math.exp(-1), rel=0.01), "the prior"
    assert chance(500, 756) == pytest.approx(math.exp(-1), rel=0.01)
    rng = random.Random(0)
    for _ in range(2000):
        # Half end at 100 or so, half at 1000; every third is cut at 40.
        length = int(rng.gauss(*rng.choice([(100, 10), (1000, 50)])))
        cut = 40 if not rng.randrange(3) else length
        for i in range(1, cut):
            lengths.grown(i)
        if cut == length:
            lengths.ended(length)
    assert chance(0, 50) > 0.97
    assert chance(0, 300) == pytest.approx(0.5, abs=0.07)
    assert chance(300, 700) > 0.95
    assert chance(0, 2000) < 0.02


def test_no_more_is_expected_than_there_would_be_if_no_output_ended():
    """Whether one of long prompts goes on makes a large deviation, but no more pages."""
    forecast, max_len = Forecast(KVLayout(16)), {}
    for i in range(20):
        request = Request(str(i), [1] * 1000, SamplingParams(max_tokens=100), frozenset({EOS}))
        seq = Sequence(request, 0, 0, [1] * 1000)
        forecast.begin(seq, 63)
        max_len[seq] = 1100
    load = forecast.load(max_len, max_len)
    assert load.most(0.0) < load.most(1.5) <= load.most(1000.0) == 20 * 69
