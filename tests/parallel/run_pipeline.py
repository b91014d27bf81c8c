"""Run by a test on virtual devices: what a model says in stages, as JSON.

run_pipeline.py MODEL SIZES OPTIONS PROMPTS KEPT, where SIZES are pairs of stages and devices of
each
"""

from __future__ import annotations

import json
import sys

import jax

from llmjax import LLM, SamplingParams
from llmjax.cache.page_store import Condense
from llmjax.checkpoint import load
from llmjax.engine.compile import CompileGuard
from llmjax.errors import ConfigError
from llmjax.structured_outputs import StructuredOutputs

model, sizes, options, prompts, kept = map(json.loads, sys.argv[1:])
if kept:  # what is quantised, as where Triton serves
    load.triton_available = lambda: True  # type: ignore[attr-defined]
greedy = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.2, prompt_logprobs=1
)
choice = SamplingParams(
    temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(choice=["yes, that", "no"])
)


def devices_of(tree):
    return sorted({d.id for leaf in jax.tree.leaves(tree) for d in leaf.sharding.device_set})


def count_evictions(plans):
    return sum(isinstance(t, Condense) for plan in plans for t in plan.transfers)


def run(stages: int, tensor: int) -> dict:
    with LLM(
        model,
        pipeline_parallel_size=stages,
        tensor_parallel_size=tensor,
        background=False,
        **options,
    ) as llm:
        engine = llm.engine
        plans, dispatch = [], engine.runner.dispatch
        engine.runner.dispatch = lambda plan: plans.append(plan) or dispatch(plan)
        with CompileGuard():
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
        engine.scheduler.check_balance()
        refused = ""
        try:
            llm.forward([3, 4])
        except ConfigError as error:
            refused = str(error)
        return {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "logprobs": [
                [next(iter(at.values())).logprob for at in output.prompt_logprobs[1:]]
                for output in outputs
            ],
            "chosen": llm.generate(["a", "b"], choice, use_tqdm=False)[0].outputs[0].text,
            "preemptions": engine.stats().num_preemptions,
            "loaded": engine.stats().pages_loaded,
            "decodes": max(len(plan.chunks) for plan in plans),
            "evictions": count_evictions(plans),
            "weights": [devices_of(part.state) for part in engine.model.parts],
            "pages": [devices_of(pool) for pool in engine.runner._state.pages],
            "history": devices_of(engine.runner._state.history),
            "refused": refused,
        }


print(json.dumps([run(*size) for size in sizes]))
