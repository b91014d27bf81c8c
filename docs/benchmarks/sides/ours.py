"""llmjax in process. Usage: ours.py MODEL"""

import itertools
import sys
from dataclasses import asdict

import worker

answers = worker.claim_stdout()

from llmjax import LLM, __version__  # noqa: E402
from llmjax.bench import latency  # noqa: E402

assert (worker.PROMPT_LEN, worker.HEAD_START) == (latency.PROMPT_LEN, latency.HEAD_START)
llm = LLM(sys.argv[1], background=False, max_model_len=1024, num_gpu_blocks_override=1024)
seeds = itertools.count()
worker.run(
    answers,
    {"version": __version__, "work": asdict(latency.Work.of(llm.engine.model))},
    lambda streams, steps: latency.decode_seconds(llm, streams, steps, seed=next(seeds)),
    lambda tokens: latency.prefill_seconds(llm, tokens, seed=next(seeds)),
)
llm.close()
