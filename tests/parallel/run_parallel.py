"""Run by a test on virtual devices: what a model says spread over 1, 2, ... of them, as JSON.

run_parallel.py MODEL SIZES OPTIONS PROMPTS KEPT
"""

from __future__ import annotations

import json
import sys

import jax

from llmjax import LLM, SamplingParams
from llmjax.cache.page_store import Condense
from llmjax.checkpoint import load

model, sizes, options, prompts, kept = map(json.loads, sys.argv[1:])
if kept:  # what is quantised, as where Triton serves
    load.triton_available = lambda: True  # type: ignore[attr-defined]
WAYS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {200: 4.0, 7: -100.0}},
    {"temperature": 1.0, "seed": 1, "top_k": 5},
    {"temperature": 1.0, "seed": 2, "top_p": 0.6, "prompt_logprobs": 2},
    {"temperature": 0.8, "seed": 3, "top_k": 100, "frequency_penalty": 0.4},
    {"temperature": 1.3, "seed": 4, "min_p": 0.1},
]
params = [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, **way) for way in WAYS]


def run(size: int) -> dict:
    with LLM(model, tensor_parallel_size=size, background=False, **options) as llm:
        engine = llm.engine
        plans, dispatch = [], engine.runner.dispatch
        engine.runner.dispatch = lambda plan: plans.append(plan) or dispatch(plan)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        engine.scheduler.check_balance()
        program = engine.runner.programs[engine.buckets.ready[0]].step
        pages = jax.tree.leaves(engine.runner._state.pages)
        choices = [output.outputs[0] for output in outputs]
        return {
            "tokens": [c.token_ids for c in choices],
            "logprobs": [
                [at[t].logprob for t, at in zip(c.token_ids, c.logprobs, strict=True)]
                for c in choices
            ],
            "preemptions": engine.stats().num_preemptions,
            "evictions": sum(isinstance(t, Condense) for plan in plans for t in plan.transfers),
            "hits": engine.stats().prefix_hits,
            "pages": sum(p.nbytes for p in pages),
            "pages_of_one": sum(p.addressable_shards[0].data.nbytes for p in pages),
            "weights": engine.model.weight_bytes,
            "weights_of_one": engine.model.device_bytes,
            "aliased": program.memory_analysis().alias_size_in_bytes,
            "prompt_logprobs": [
                [
                    [of[t].logprob, of[t].rank]
                    for t, of in zip(o.prompt_token_ids, o.prompt_logprobs, strict=True)
                    if of is not None
                ]
                for o in outputs
                if o.prompt_logprobs
            ],
            "all_reduces": program.as_text().count(" all-reduce("),
            "all_gathers": program.as_text().count(" all-gather("),
        }


print(json.dumps([run(size) for size in sizes]))
