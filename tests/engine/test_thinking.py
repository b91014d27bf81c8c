"""Budgets of thinking, kept by a model that talks nonsense."""

from __future__ import annotations

import codecs
import json
from dataclasses import replace

import jsonschema
import pytest

from llmjax import LLM, SamplingParams, StructuredOutputs
from llmjax.errors import InvalidRequestError

from .said import assert_idle
from .test_structured_outputs import PERSON, SIZES

USER = [{"role": "user", "content": "hi"}]
OPEN = "<|user|>{{ messages[0].content }}<|assistant|><think>"
END = "</think>"
FREE = SamplingParams(temperature=1.0, seed=7, max_tokens=80, ignore_eos=True)
BOUND = replace(FREE, thinking_token_budget=12)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), reasoning_parser="qwen3", **SIZES) as llm:
        yield llm


def whole_characters(tokenizer, ids, count):
    """Where the character ends that `count` tokens end in; of one that never does, three more."""
    for at in range(count, count + 3):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(tokenizer.token_bytes, ids[:at])))
        if not decoder.getstate()[0]:
            return at
    return count + 3


def ask(llm, params, **options):
    return llm.chat(USER, params, chat_template=OPEN, **options)[0].outputs


def test_the_end_comes_where_the_budget_is_used_up(llm):
    end = llm.tokenizer.encode(END, add_special_tokens=False)
    free, bound = ask(llm, replace(FREE, n=2)), ask(llm, replace(BOUND, n=2))
    for one, other in zip(free, bound, strict=True):
        at = whole_characters(llm.tokenizer, one.token_ids, 12)
        assert other.token_ids[: at + len(end)] == one.token_ids[:at] + end
        assert len(other.token_ids) == 80 and other.finish_reason == "length"
        assert other.message.content and not one.message.content
    assert free[0].token_ids != free[1].token_ids
    # Token by token where their log-probabilities are asked for, and in no more steps otherwise.
    slow = ask(llm, replace(BOUND, n=2, logprobs=1))
    assert [c.token_ids for c in slow] == [c.token_ids for c in bound]
    assert len(slow[0].logprobs) == 80
    (none,) = ask(llm, replace(BOUND, thinking_token_budget=0))
    assert none.text.startswith(END) and none.message.reasoning == ""
    assert_idle(llm)


def test_streams_are_the_same(llm):
    (whole,) = ask(llm, BOUND)
    parts = [o.outputs[0] for o in llm.stream(USER, BOUND, chat_template=OPEN)]
    assert [i for part in parts for i in part.token_ids] == whole.token_ids
    for name in ("reasoning", "content"):
        said = "".join(getattr(part.message, name) for part in parts)
        assert said == getattr(whole.message, name)


def test_structured_output_comes_after_the_bounded_reasoning(llm):
    params = replace(BOUND, max_tokens=200, structured_outputs=StructuredOutputs(json=PERSON))
    for choice in ask(llm, replace(params, n=3)):
        assert choice.finish_reason == "stop"
        assert choice.text.index(END) <= 12
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert_idle(llm)


def test_in_a_crowd_and_preempted(llm, tiny_model):
    params = replace(BOUND, n=2, max_tokens=60)
    given = [replace(params, thinking_token_budget=b, seed=b) for b in (1, 5, 20, 33, 59, 70)]
    alone = [ask(llm, one) for one in given]
    small = {"num_gpu_blocks_override": 64, "forecast_margin": None, "prefill_chunk_size": 8}
    with LLM(str(tiny_model), reasoning_parser="qwen3", **{**SIZES, **small}) as cramped:
        crowd = cramped.chat([USER] * len(given), given, chat_template=OPEN)
        assert cramped.engine.scheduler.num_preemptions > 0
        assert_idle(cramped)
    for one, other in zip(alone, crowd, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other.outputs]


def test_what_was_thought_before_counts(llm):
    begun = {"role": "assistant", "content": "<think>12345"}
    template = "{{ messages[0].content }}<a>{{ messages[1].content }}"
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    params = replace(BOUND, thinking_token_budget=8)
    (output,) = llm.chat([*USER, begun], params, chat_template=template, **going_on)
    end = llm.tokenizer.encode(END, add_special_tokens=False)
    ids = output.outputs[0].token_ids
    at = whole_characters(llm.tokenizer, ids, 3)
    assert ids[at : at + len(end)] == end
    # Nothing is bounded where the reasoning is over.
    begun["content"] = "<think>Hm.</think>"
    (output,) = llm.chat([*USER, begun], params, chat_template=template, **going_on)
    assert END not in output.outputs[0].text


def test_refusals(llm, tiny_model):
    with pytest.raises(InvalidRequestError, match="thinking_token_budget: allowed in chats"):
        llm.generate("a prompt", BOUND)
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: without </think>"):
        ask(llm, replace(BOUND, allowed_token_ids=[60, 61]))
    with pytest.raises(InvalidRequestError, match="thinking_token_budget is -1"):
        replace(BOUND, thinking_token_budget=-1)
    config = llm.engine.config.model
    try:
        for parser in (None, "gpt_oss"):
            model = replace(config, reasoning_parser=parser)
            llm.engine.config = replace(llm.engine.config, model=model)
            with pytest.raises(InvalidRequestError, match="--reasoning-parser") as caught:
                ask(llm, BOUND)
            assert caught.value.param == "thinking_token_budget"
    finally:
        llm.engine.config = replace(llm.engine.config, model=config)
    assert_idle(llm)
