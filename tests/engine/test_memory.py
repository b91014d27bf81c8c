"""How many pages there are: what weights and the largest step, as compiled, leave."""

from __future__ import annotations

import re

import pytest

from llmjax import LLM, SamplingParams
from llmjax.engine import memory
from llmjax.engine.step import temporaries_of
from llmjax.errors import ConfigError

LIMIT = 1_400_000
SIZES = {
    "max_model_len": 256,
    "block_size": 16,
    "max_num_seqs": 8,
    "token_buckets": (16, 64),
    "seq_buckets": (8,),
    "prefill_chunk_size": 32,
    "max_num_batched_tokens": 64,
    "background": False,
    "dtype": "float32",
}


@pytest.fixture
def own_memory(monkeypatch):
    """As on an accelerator: XLA serves, and the device says how much it has."""
    monkeypatch.setenv("LLMJAX_KERNELS", "xla")

    def limit(size):
        monkeypatch.setattr(memory, "_bytes_limit", lambda: size)

    return limit


# Of 48 steps as one the results take more than the largest step does.
@pytest.mark.parametrize("options", [{}, {"num_scheduler_steps": 48, "max_logprobs": 200}])
def test_pages_are_what_weights_and_the_compiled_step_leave(tiny_model, own_memory, options):
    own_memory(LIMIT)
    with LLM(str(tiny_model), gpu_memory_utilization=0.9, **SIZES, **options) as llm:
        engine = llm.engine
        # The programs that run, with all the pages there are, need no more than was planned for.
        ready = [engine.runner.programs[bucket] for bucket in engine.buckets.ready]
        most = max(map(temporaries_of, ready))
        pool = engine.num_pages * engine.page_bytes
        taken = engine.model.weight_bytes + pool + most
        assert 0.9 * LIMIT - engine.page_bytes < taken <= 0.9 * LIMIT
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        assert len(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids) == 5


def test_a_device_too_small_says_what_takes_how_much(tiny_model, own_memory):
    own_memory(LIMIT // 8)
    with pytest.raises(ConfigError, match="no memory is left for KV pages") as error:
        LLM(str(tiny_model), **SIZES)
    assert re.search(r"0\.9 of .* of weights and .* of a step's temporaries", str(error.value))
