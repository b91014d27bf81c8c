"""What vLLM's CPU build makes of a quantised folder, in bfloat16.

Usage and answer are those of quantised_transformers.py.
"""

import json
import os
import sys

import numpy as np
import worker

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main():
    answers = worker.claim_stdout()

    import vllm
    from vllm import LLM, SamplingParams

    folder, windows, *numbers = sys.argv[1:]
    count, prompt, answer = map(int, numbers)
    ids = np.load(windows)[:count].tolist()
    llm = LLM(folder, max_model_len=1024, enforce_eager=True, enable_prefix_caching=False)

    def generate(rows, **params):
        prompts = [{"prompt_token_ids": row} for row in rows]
        return llm.generate(prompts, SamplingParams(temperature=0, **params), use_tqdm=False)

    def loss(out, row):
        scores = zip(out.prompt_logprobs[1:], row[1:], strict=True)
        return -float(np.mean([given[token].logprob for given, token in scores]))

    read = generate(ids, max_tokens=1, prompt_logprobs=0)
    losses = [loss(out, row) for out, row in zip(read, ids, strict=True)]
    starts = [row[:prompt] for row in ids]
    made = generate(starts, max_tokens=answer, ignore_eos=True)
    texts = [[*row, *out.outputs[0].token_ids] for row, out in zip(starts, made, strict=True)]
    about = {"version": f"vLLM {vllm.__version__}"}
    print(json.dumps(about | {"nll": losses, "ids": texts}), file=answers)


if __name__ == "__main__":
    main()
