"""What must hold of any model and device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.advise.estimate import estimate, find_memory, make_machine
from llmjax.advise.model import Model
from llmjax.advise.question import Question
from llmjax.advise.schemes import SCHEMES, weights_here
from llmjax.advise.speculation import speculation
from llmjax.simulate.device import DEVICES, Figures
from llmjax.simulate.shapes import ModelShape


@st.composite
def models(draw) -> Model:
    kv_heads, group = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 4]))
    layers = draw(st.integers(1, 8))
    window = st.sampled_from([None, 256, 1024])
    shape = ModelShape(
        vocab_size=draw(st.integers(100, 200_000)),
        hidden_size=draw(st.sampled_from([256, 640, 4096])),
        num_layers=layers,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        mlp_size=draw(st.sampled_from([512, 14336])),
        max_position=8192,
        tie_embeddings=draw(st.booleans()),
        windows=tuple(draw(window) for _ in range(layers)),
    )
    return Model("some", shape)


@st.composite
def cases(draw) -> tuple[Question, Model, Figures, str, str]:
    figures = DEVICES[draw(st.sampled_from(sorted(DEVICES.keys() - {"cpu"})))]
    question = Question(
        "some",
        "h100",
        p99=draw(st.sampled_from([None, 0.1, 1.0, 20.0])),
        input_len=draw(st.integers(1, 4000)),
        output_len=draw(st.integers(1, 2000)),
    )
    model = draw(models())
    scheme = draw(st.sampled_from(sorted(weights_here(model.shape, figures))))
    kv_dtype = draw(st.sampled_from(["bfloat16", "int8", "fp8_e4m3"]))
    return question, model, figures, scheme, kv_dtype


def found(question, model, figures, scheme, kv_dtype):
    weights = weights_here(model.shape, figures)[scheme]
    machine = make_machine(question, model, figures, weights, kv_dtype, 1)
    memory = find_memory(question, machine)
    return memory, estimate(question, machine, memory) if memory.fits else None


@given(cases(), st.floats(1, 4))
@settings(max_examples=60, deadline=None)
def test_more_memory_never_fits_fewer(case, times):
    question, model, figures, *rest = case
    more = replace(figures, memory=times * figures.memory)
    assert found(question, model, more, *rest)[0].fits >= found(*case)[0].fits


@given(cases(), st.floats(0.01, 60), st.floats(0.01, 60))
@settings(max_examples=60, deadline=None)
def test_a_lower_p99_never_gives_a_larger_batch(case, one, other):
    question, *rest = case
    low, high = (
        found(replace(question, p99=p99), *rest)[1] for p99 in (min(one, other), max(one, other))
    )
    if low is None or high is None:
        assert low is high
        return
    assert low.batch <= high.batch
    assert low.keeps_p99 <= high.keeps_p99


@given(cases())
@settings(max_examples=60, deadline=None)
def test_what_is_advised_fits_and_keeps_p99(case):
    question, *_ = case
    memory, chosen = found(*case)
    if chosen is None:
        assert memory.weights + memory.temporaries + memory.request > memory.total
        return
    taken = memory.weights + memory.temporaries + memory.fits * memory.request
    assert 1 <= chosen.batch <= memory.fits
    assert taken <= memory.total
    late = question.p99 is not None and chosen.answer_s > question.p99
    assert chosen.keeps_p99 is not late
    if late:
        assert chosen.batch == 1
    assert chosen.alone_s <= chosen.answer_s * (1 + 1e-9)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_8_bits_take_less_than_16(case):
    question, model, figures, scheme, _ = case
    if scheme not in ("fp8", "smoothquant", "awq", "gptq", "nvfp4", "mxfp4", "int8", "int4"):
        return
    floats, smaller = (
        found(question, model, figures, name, "bfloat16")[0] for name in ("bf16", scheme)
    )
    assert smaller.weights < floats.weights
    eight = found(question, model, figures, scheme, "int8")[0]
    assert eight.kv_token < smaller.kv_token and eight.fits >= smaller.fits


@given(cases(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_more_accepted_drafts_never_gain_less(case, one, other):
    question, *rest = case
    _, chosen = found(question, *rest)
    if chosen is None or question.output_len == 1:
        return
    few, many = (
        speculation(chosen.machine, replace(question, acceptance=a), chosen.batch)
        for a in sorted((one, other))
    )
    assert few.speedup <= many.speedup * (1 + 1e-9)
    assert 1 <= many.tokens <= many.drafts + 1


@pytest.mark.parametrize("gpu", sorted(DEVICES))
def test_every_scheme_says_what_its_device_multiplies(gpu):
    shape = ModelShape(1000, 256, 4, 4, 2, 64, 512, 2048)
    for name, weights in weights_here(shape, DEVICES[gpu] if gpu != "cpu" else CPU).items():
        figures = DEVICES[gpu] if gpu != "cpu" else CPU
        assert figures.peak_of(weights.products) and figures.peak_of(weights.head_products)
        assert SCHEMES[name].bits <= weights.bits <= 16


CPU = replace(DEVICES["cpu"], int8=1e12)
