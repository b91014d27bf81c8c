"""Run by a test on virtual devices: what a model says spread over 1, 2, ... of them, as JSON.

run_parallel.py MODEL SIZES OPTIONS PROMPTS
"""

from __future__ import annotations

import json
import sys

import jax

from llmjax import LLM, SamplingParams

model, sizes, options, prompts = map(json.loads, sys.argv[1:])
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


def run(size: int) -> dict:
    with LLM(model, tensor_parallel_size=size, background=False, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        engine = llm.engine
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
            "hits": engine.stats().prefix_hits,
            "pages": sum(p.nbytes for p in pages),
            "pages_of_one": sum(p.addressable_shards[0].data.nbytes for p in pages),
            "weights": engine.model.weight_bytes,
            "weights_of_one": engine.model.device_bytes,
            "aliased": program.memory_analysis().alias_size_in_bytes,
            "all_reduces": program.as_text().count(" all-reduce("),
            "all_gathers": program.as_text().count(" all-gather("),
        }


print(json.dumps([run(size) for size in sizes]))
