"""The promises of the engine, on a tiny random model: what else runs never shows."""

from __future__ import annotations

import gc
import random
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax import LLM, SamplingParams
from llmjax.engine.compile import CompileGuard
from llmjax.errors import ConfigError, InvalidRequestError, ShutdownError

from .said import assert_idle

VOCAB = 320
SIZES = {
    "max_model_len": 96,
    "block_size": 4,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 60,
    "token_buckets": (16, 96),
    "seq_buckets": (4, 32),
    "background": False,
}
"""Pages for about three sequences; both engines share their step programs."""


@pytest.fixture(scope="module")
def roomy(tiny_model):
    """Takes prompts whole; these tests give it one request at a time."""
    llm = LLM(str(tiny_model), prefill_chunk_size=96, **SIZES)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def cramped(tiny_model):
    """Takes prompts in chunks of 16, from crowds that its pages do not hold."""
    llm = LLM(str(tiny_model), prefill_chunk_size=16, forecast_margin=None, **SIZES)
    yield llm
    llm.close()


def alone(llm, prompt, params):
    return llm.generate(prompt, params)[0].outputs[0].token_ids


prompts = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=60)
loads = st.lists(st.tuples(prompts, st.integers(1, 30)), min_size=2, max_size=32)


@settings(max_examples=15, deadline=None)
@given(loads)
def test_greedy_tokens_depend_on_nothing_but_the_prompt(roomy, cramped, load):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in load]
    expected = [alone(roomy, prompt, p) for (prompt, _), p in zip(load, params, strict=True)]
    outputs = cramped.generate([prompt for prompt, _ in load], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert_idle(cramped)


def test_a_crowd_is_preempted_and_nothing_it_said_changes(roomy, cramped):
    rng = random.Random(0)
    load = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(20, 60))] for _ in range(31)]
    params = SamplingParams(
        temperature=0.9,
        seed=5,
        max_tokens=30,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
    )
    before = cramped.engine.stats().num_preemptions
    crowd = cramped.generate(load, params, use_tqdm=False)
    assert cramped.engine.stats().num_preemptions > before
    for prompt, output in zip(load, crowd, strict=True):
        single = roomy.generate(prompt, params)[0]
        ours, theirs = output.outputs[0], single.outputs[0]
        assert ours.token_ids == theirs.token_ids
        assert ours.text == theirs.text
        assert len(ours.logprobs) == 30 and len(output.prompt_logprobs) == len(prompt)
        compare_logprobs(ours.logprobs, theirs.logprobs)
        compare_logprobs(output.prompt_logprobs[1:], single.prompt_logprobs[1:])
    assert_idle(cramped)


def compare_logprobs(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for token, entry in a.items():
            assert entry.logprob == pytest.approx(b[token].logprob, abs=1e-4)


def test_prompt_logprobs_are_the_forward_passes(roomy):
    prompt = list(range(10, 80))
    output = roomy.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    logprobs = jax.nn.log_softmax(roomy.forward(prompt).logits)
    expected = jnp.take_along_axis(logprobs[:-1], jnp.array(prompt[1:])[:, None], 1)[:, 0]
    rows = output[0].prompt_logprobs
    assert rows[0] is None
    ours = [row[token].logprob for row, token in zip(rows[1:], prompt[1:], strict=True)]
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_choices_share_the_prompts_logprobs(roomy):
    prompt = list(range(10, 40))
    params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    rows = roomy.generate(prompt, params)[0].prompt_logprobs
    assert [list(row) for row in rows[1:]] == [[token] for token in prompt[1:]]


def test_greedy_tokens_are_the_forward_passes(roomy):
    prompt = list(range(30, 50))
    tokens = alone(roomy, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for i, token in enumerate(tokens):
        assert int(roomy.forward(prompt + tokens[:i]).logits[-1].argmax()) == token


def test_gradients_reach_every_parameter(roomy):
    def loss(model):
        return jax.nn.log_softmax(model(jnp.arange(10, 30)).logits)[-1, 5]

    gradients = nnx.to_flat_state(nnx.grad(loss)(roomy.model))
    assert ("embed", "weight") in dict(gradients)
    assert [path for path, gradient in gradients if not jnp.any(gradient[...])] == []


def test_steady_load_compiles_nothing(cramped):
    rng = random.Random(1)

    def load(count):
        batch = [
            [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(count)
        ]
        params = [
            SamplingParams(
                temperature=rng.choice([0, 1]),
                top_p=rng.choice([0.5, 1]),
                max_tokens=rng.randrange(1, 30),
                min_tokens=1,
                logit_bias=rng.choice([{}, {5: 2.0}]),
                logprobs=rng.choice([None, 3]),
                prompt_logprobs=rng.choice([None, 3]),
                presence_penalty=rng.choice([0, 1]),
            )
            for _ in batch
        ]
        return batch, params

    first = load(20)
    cramped.generate(*first, use_tqdm=False)
    with CompileGuard():
        for count in (1, 7, 32, 40):
            cramped.generate(*load(count), use_tqdm=False)


def test_the_guard_notices_a_compilation():
    from llmjax.errors import UnexpectedCompileError

    with pytest.raises(UnexpectedCompileError, match="1 program"), CompileGuard():
        jax.jit(lambda x: x * 3.25 + 17)(np.float32(2)).block_until_ready()


def test_seeds_and_choices(roomy):
    prompt = [7, 8, 9]
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12, ignore_eos=True)
    first = [c.token_ids for c in roomy.generate(prompt, params)[0].outputs]
    again = [c.token_ids for c in roomy.generate([prompt, [5]], params)[0].outputs]
    assert first == again
    assert len({tuple(t) for t in first}) == 4
    single = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    assert alone(roomy, prompt, single) == first[2]


def test_a_chat_template_of_ones_own(tiny_model, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    for template in (str(file), "{{ messages[0].content }}!"):
        llm = LLM(str(tiny_model), chat_template=template, **SIZES)
        assert llm.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
        llm.close()


def test_without_a_seed_runs_differ(roomy):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    texts = {tuple(alone(roomy, [7, 8, 9], params)) for _ in range(3)}
    assert len(texts) == 3


def test_stop_token_eos_and_min_tokens(roomy):
    prompt = list(range(30, 50))
    free = alone(roomy, prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    stop = free[4]
    where = free.index(stop)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    choice = roomy.generate(prompt, params)[0].outputs[0]
    assert choice.token_ids == free[: where + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    params = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=10, ignore_eos=True, stop_token_ids=[stop]
    )
    held = alone(roomy, prompt, params)
    assert stop not in held[:10]
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100})
    choice = roomy.generate(prompt, params)[0].outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.text) == ([2], "stop", "")
    ignored = SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100}, ignore_eos=True)
    assert alone(roomy, prompt, ignored) == [2] * 5


def test_stop_strings_split_over_tokens_are_never_shown(roomy):
    encode = roomy.tokenizer.encode
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    text = roomy.generate("hello", params)[0].outputs[0].text
    stop = text[5:8]
    where = text.index(stop)
    stopping = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop)
    pieces = [o.outputs[0].text for o in roomy.stream(encode("hello"), stopping)]
    assert "".join(pieces) == text[:where]
    final = roomy.generate("hello", stopping)[0].outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == (text[:where], "stop", stop)
    assert_idle(roomy)


def test_leaving_a_stream_early_frees_its_pages(roomy):
    stream = roomy.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert_idle(roomy)


def test_a_stream_left_half_read_blocks_nobody(roomy):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = alone(roomy, [5, 6, 7], params)
    half_read = roomy.stream([5, 6, 7], params)
    tokens = list(next(half_read).outputs[0].token_ids)
    assert alone(roomy, [5, 6, 7], params) == expected
    for output in half_read:
        tokens += output.outputs[0].token_ids
    assert tokens == expected
    assert_idle(roomy)


def test_a_stream_may_be_collected_as_garbage_in_the_middle_of_a_call(roomy, monkeypatch):
    stream = roomy.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    collect = roomy.engine.runner.collect

    def collect_garbage_too(step):
        gc.collect()
        return collect(step)

    monkeypatch.setattr(roomy.engine.runner, "collect", collect_garbage_too)
    assert len(alone(roomy, [5, 6], SamplingParams(max_tokens=3, ignore_eos=True))) == 3
    assert_idle(roomy)


def test_template_arguments_need_messages(roomy):
    with pytest.raises(InvalidRequestError, match="tools"):
        next(roomy.stream("hello", tools=[]))


def test_an_interrupt_within_a_step_leaves_the_engine_whole(roomy, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = alone(roomy, [5, 6, 7], params)
    collect = roomy.engine.runner.collect

    def interrupted(step):
        signal.raise_signal(signal.SIGINT)
        return collect(step)

    # A test run in the background of a shell ignores SIGINT from its start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(roomy.engine.runner, "collect", interrupted)
            roomy.generate([[5, 6, 7], [8]], params)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_idle(roomy)
    assert alone(roomy, [5, 6, 7], params) == expected


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty prompt"),
        ([-1], {}, "token id -1"),
        ([VOCAB], {}, f"0 to {VOCAB - 1}"),
        ([2**31], {}, "not in the vocabulary"),
        ([5] * 96, {"max_tokens": 1}, "96 tokens"),
        ([5] * 90, {"max_tokens": 7}, "context holds 96"),
        ([5], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([5], {"logprobs": 21}, "max_logprobs"),
        ([5], {"prompt_logprobs": 21}, "max_logprobs"),
    ],
)
def test_what_cannot_run_is_refused_and_others_go_on(roomy, prompt, params, message):
    with pytest.raises(InvalidRequestError, match=message):
        roomy.generate([[5, 6], prompt], SamplingParams(**{"max_tokens": 1, **params}))
    assert len(alone(roomy, [5, 6], SamplingParams(max_tokens=3, ignore_eos=True))) == 3
    assert_idle(roomy)


def test_the_context_is_no_larger_than_the_pool(tiny_model, caplog, capsys):
    options = {**SIZES, "num_gpu_blocks_override": 8, "prefill_chunk_size": 16}
    with LLM(str(tiny_model), **{**options, "max_model_len": None}) as llm:
        assert "max_model_len is lowered from 256 to 32, what the KV pool holds" in caplog.messages
        with pytest.raises(InvalidRequestError, match="the context holds 32"):
            llm.generate([5] * 40, SamplingParams(max_tokens=4))
        long = llm.generate([5] * 20, SamplingParams(max_tokens=None, ignore_eos=True))[0]
        assert len(long.outputs[0].token_ids) == 12
        assert_idle(llm)
    assert "compiling step programs: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_gpu_blocks_override": 8},
            r"the KV pool holds 32 tokens \(8 pages\), but max_model_len needs 96 \(24 pages\)",
        ),
        (
            {"num_gpu_blocks_override": 1, "max_model_len": None},
            r"holds 4 tokens \(1 pages\), but one step of one sequence needs 256 \(64 pages\)",
        ),
        (
            {"num_gpu_blocks_override": 3, "max_model_len": None, "prefill_chunk_size": 16},
            r"holds 12 tokens \(3 pages\), but one step of one sequence needs 16 \(4 pages\)",
        ),
    ],
)
def test_a_pool_too_small_is_refused_at_start_with_the_numbers(tiny_model, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), **{**SIZES, **options})


def test_what_the_model_does_not_allow_is_refused_before_its_weights_are_read(
    tiny_model, monkeypatch
):
    def load(*args, **options):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("llmjax.checkpoint.load.load_weights", load)
    for options, message in (
        ({"max_model_len": 257}, "max_model_len is 257, the model allows up to 256"),
        ({"page_buckets": (4,)}, "page_buckets is"),
        ({"seq_buckets": (4,)}, "seq_buckets is"),
        ({"chat_template": "{% if %}"}, "chat_template: .* not valid Jinja: line 1"),
        ({"chat_template": "/no/such/file"}, "chat_template is '/no/such/file', allowed"),
        ({"num_gpu_blocks_override": 8}, "the KV pool holds 32 tokens"),
        # No native kernel takes pages of 4.
        ({"threads": 2}, "threads: only the native CPU kernels take it, and XLA serves here"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tiny_model), **{**SIZES, **options})


def test_a_closed_model_says_so(tiny_model):
    with LLM(str(tiny_model), **SIZES) as llm:
        half_read, unread = llm.stream([5, 6], SamplingParams(max_tokens=9)), llm.stream([7])
        next(half_read)
    llm.close()
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.stream("a"),
        lambda: next(half_read),
        lambda: next(unread),
        lambda: llm.forward([5]),
        lambda: llm.tokenizer,
        lambda: llm.model,
    ):
        with pytest.raises(ShutdownError, match="this LLM is closed"):
            use()


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.generate(None), "prompts"),
        (lambda llm: llm.generate(5), "prompts"),
        (lambda llm: llm.generate({"a", "b"}), "prompts"),
        (lambda llm: llm.generate([None]), "prompt"),
        (lambda llm: llm.generate([5, "a"]), "prompt"),
        (lambda llm: llm.generate([1.5]), "prompt"),
        (lambda llm: llm.generate({"prompt": 5}), "prompt"),
        (lambda llm: llm.generate({5: "a", "b": 1}), "prompt"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "params"),
        (lambda llm: llm.generate("a", [None]), "params"),
        (lambda llm: llm.generate("a", [SamplingParams()] * 2), "params"),
        (lambda llm: llm.chat(None), "messages"),
        (lambda llm: llm.chat("hi"), "messages"),
        (lambda llm: llm.chat(USER), "messages"),
        (lambda llm: llm.chat([[USER], None]), "messages"),
        (lambda llm: llm.chat([USER], {"temperature": 0}), "params"),
        (lambda llm: llm.stream(None), "prompt"),
        (lambda llm: llm.stream(["a", "b"]), "prompt"),
        (lambda llm: llm.stream("a", {"temperature": 0}), "params"),
        (lambda llm: llm.forward("hi"), "token_ids"),
        (lambda llm: llm.forward(5), "token_ids"),
        (lambda llm: llm.forward(), "token_ids"),
        (lambda llm: llm.forward([]), "token_ids"),
        (lambda llm: llm.forward([VOCAB]), "token_ids"),
        (lambda llm: llm.forward([1.5]), "token_ids"),
        (lambda llm: llm.forward([5], inputs_embeds=jnp.zeros((1, 64))), "token_ids"),
        (lambda llm: llm.forward(inputs_embeds="hi"), "inputs_embeds"),
        (lambda llm: llm.forward(inputs_embeds=jnp.zeros((2, 3))), "inputs_embeds"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(roomy, call, param):
    with pytest.raises(InvalidRequestError, match=param) as caught:
        call(roomy)
    assert "allowed: " in str(caught.value)
    assert caught.value.param == param
    assert_idle(roomy)


def test_prompts_come_as_lists_or_arrays(roomy):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected = alone(roomy, [5, 6, 7], params)
    for one in ((5, 6, 7), np.array([5, 6, 7]), jnp.array([5, 6, 7])):
        assert alone(roomy, one, params) == expected
        assert alone(roomy, {"prompt_token_ids": one}, params) == expected
    two = roomy.generate(np.array([[5, 6, 7], [5, 6, 7]]), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in two] == [expected] * 2


def test_page_buckets_may_hold_more_than_the_context(tiny_model, roomy):
    sizes = {"max_num_seqs": 4, "seq_buckets": (4,), "token_buckets": (16,)}
    llm = LLM(str(tiny_model), **{**SIZES, **sizes, "page_buckets": (4, 32)})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert alone(llm, [5, 6, 7], params) == alone(roomy, [5, 6, 7], params)
    llm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_such_option": 1}, "no_such_option"),
        ({"dtype": "int3"}, "dtype"),
        ({"block_size": 3}, "power of two"),
        ({"max_model_len": 1}, "max_model_len is 1, allowed: 2 or more"),
    ],
)
def test_wrong_options_are_named(tiny_model, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), **options)
