"""Plans of several decode steps: how far rows go, and what their tokens mean at commit."""

import random

import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig, SchedulerConfig
from llmjax.distributed import check_together
from llmjax.engine import scheduler as scheduler_module
from llmjax.engine.compile import CompileGuard
from llmjax.engine.lookahead import look_ahead
from llmjax.errors import ConfigError

from .said import assert_idle
from .scheduler_harness import STOP, VOCAB, Harness, alone
from .test_scheduler_properties import small_harness

SHARED = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def several(steps, **options):
    config = SchedulerConfig(max_num_seqs=4, forecast_margin=None, num_scheduler_steps=steps)
    return Harness(config, **options)


def decoding(h):
    """What the next plan of decodes computes of each row, by request."""
    while (plan := h.dispatch()) is None or any(c.start < c.seq.prompt_len for c in plan.chunks):
        h.commit()
    return {c.seq.request.id: (c.count, c.samples) for c in plan.chunks}


def test_engine_steps_fall_accordingly():
    said, dispatched = [], []
    for steps in (1, 8):
        h, count = several(steps, depth=1), 0
        (seq,) = h.add([3, 4, 5], max_tokens=33, ignore_eos=True)
        while h.step():
            count += 1
        h.check_outputs()
        said.append(seq.tokens)
        dispatched.append(count)
    assert said[0] == said[1]
    assert dispatched == [33, 1 + 32 // 8]


def test_no_row_goes_beyond_its_last_token():
    h = several(8)
    h.add([3, 4, 5], id="a", max_tokens=4, ignore_eos=True)
    h.add([3, 4, 6], id="b", max_tokens=40, ignore_eos=True)
    assert decoding(h) == {"a": (3, 3), "b": (8, 8)}
    h.drain()
    h.check_outputs()


def test_a_row_stops_at_its_last_page_rather_than_at_the_cost_of_others():
    h = several(8, num_blocks=5, max_model_len=20)
    (first,) = h.add([3] * 4, id="a", max_tokens=16, ignore_eos=True)
    h.add([4] * 5, id="b", max_tokens=11, ignore_eos=True)
    assert decoding(h) == {"a": (8, 8), "b": (3, 3)}  # which holds the second of its pages
    assert not first.num_preemptions and not h.scheduler.num_preemptions
    h.drain()
    h.check_outputs()


@pytest.mark.parametrize("reason", ["prompt", "grammar"])
def test_one_step_at_a_time_beside(reason):
    h = several(8, depth=1)
    h.add([3, 4, 5], id="a", max_tokens=40, ignore_eos=True)
    assert decoding(h)["a"] == (8, 8)
    if reason == "prompt":
        h.add([3, 4, 6], id="b")
    else:
        h.add([3, 4, 6], id="b", max_tokens=9, ignore_eos=True, forces=True)
        h.step()
    h.step()
    plan = h.dispatch()
    assert {c.seq.request.id: c.width for c in plan.chunks}["a"] == 1 == plan.num_steps
    h.drain()
    h.check_outputs()


def ends_early():
    """A prompt whose output ends at the second of eight decode steps, and its tokens."""
    for token in range(2, VOCAB):
        h = several(8, depth=3)
        (seq,) = h.add([token, 3, 4, 5], max_tokens=30)
        if len(alone(seq, 34)[0]) == 3:
            return h, seq
    raise AssertionError("no such prompt")


def test_a_late_stop_is_rolled_back():
    h, seq = ends_early()
    prompt, decodes, late = (h.dispatch() for _ in range(3))
    assert [p.num_steps for p in (prompt, decodes, late)] == [1, 8, 8]
    h.commit()
    (delta,) = h.commit()
    assert len(delta.token_ids) == 2 and delta.finish_reason
    assert h.commit() == []
    h.check_outputs()
    # The stop token was never computed, and must not be remembered as if it had been.
    assert seq.num_computed == len(seq.tokens) - 1
    assert not h.scheduler.has_work and not h.cache.num_used


def loads(seeds=range(25)):
    """Crowds in tiny pools whose outputs end at any of several steps."""
    for seed in seeds:
        rng = random.Random(seed)
        windows = rng.choice([(None,), (None, 6)])
        h = small_harness(
            *(2, True, rng.choice([3, 8]), 8 * len(windows), 0.0, 0.5, True),
            windows=windows,
            caching=True,
            steps=rng.choice([3, 8]),
        )
        outputs = [SHARED]
        for _ in range(12):
            # What was said before is asked about again: its pages are still there.
            prompt = rng.choice(outputs)[:12] + [rng.randrange(VOCAB)] * rng.randint(1, 4)
            (seq,) = h.add(prompt, max_tokens=rng.randint(1, 14), stop_token_ids=[STOP])
            for _ in range(rng.randint(0, 5)):
                h.step()
            outputs.append(seq.tokens)
        h.drain()
        h.check_outputs()
        yield h


def test_crowds_say_what_each_says_alone():
    done = list(loads())
    assert sum(h.scheduler.num_preemptions for h in done) > 10
    assert sum(h.cache.stats.hit for h in done) > 100


def too_far(chunks, *args):
    look_ahead(chunks, *args)
    for chunk in chunks:
        chunk.count = chunk.samples = chunk.count + 1


def test_a_row_that_goes_too_far_is_seen(monkeypatch):
    monkeypatch.setattr(scheduler_module, "look_ahead", too_far)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        list(loads(range(3)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_scheduler_steps": 0}, "num_scheduler_steps is 0, allowed: 1 to 64"),
        (
            {"num_scheduler_steps": 4, "pipeline_parallel_size": 2},
            "num_scheduler_steps is 4, allowed with a pipeline_parallel_size of 2: 1",
        ),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.of("a-model", **options)


def test_several_processes_take_one_step_at_a_time():
    config = EngineConfig.of("a-model", num_scheduler_steps=4)
    with pytest.raises(ConfigError, match="num_scheduler_steps is 4, allowed with coordinator"):
        check_together(config)


# With a model


SIZES = {
    "max_model_len": 64,
    "block_size": 16,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 8,
    "token_buckets": (16,),
    "seq_buckets": (4,),
    "background": False,
    "prefill_chunk_size": 16,
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [20] * 9, [30, 31]]
ASKED = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "choices": {"temperature": 0.9, "seed": 3, "n": 2, "presence_penalty": 0.5},
    "least": {"temperature": 1.2, "seed": 11, "min_tokens": 6, "logit_bias": {2: 4.0, 9: 4.0}},
    "one of them bound": {"temperature": 0.8, "seed": 1, "bad_words": ["a"]},
    "prompt's logprobs": {"temperature": 0, "prompt_logprobs": 1, "logprobs": 1},
    "text": {"temperature": 1.0, "seed": 5, "stop": ["e", "o"], "min_tokens": 2},
}


@pytest.fixture(scope="module")
def models(tiny_model):
    """An engine of one step at a time, and one of up to 8."""
    both = [LLM(str(tiny_model), num_scheduler_steps=steps, **SIZES) for steps in (1, 8)]
    yield both
    for llm in both:
        llm.close()


def said(llm, params):
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        (o.prompt_logprobs, c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason)
        for o in outputs
        for c in o.outputs
    ]


@pytest.mark.parametrize("name", ASKED)
def test_all_is_said_as_one_step_at_a_time_says_it(models, name):
    lengths = (6, 14, 25, 25)
    params = [SamplingParams(**ASKED[name], max_tokens=n, stop_token_ids=[9]) for n in lengths]
    if name == "one of them bound":
        free = SamplingParams(temperature=0, max_tokens=20)
        params = [params[1], free, free, free]
    one, several = models
    with CompileGuard():
        expected = said(one, params)
        assert said(several, params) == expected
    assert_idle(several)


def test_the_engine_has_fewer_steps(models):
    params = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    counts = []
    for llm in models:
        before = llm.engine.num_steps
        llm.generate([5, 6, 7], params, use_tqdm=False)
        counts.append(llm.engine.num_steps - before)
    assert counts[0] >= 33
    assert counts[1] <= 1 + 32 // 8 + 1
