"""Many questions about one text: what the prefix cache saves.

    python docs/benchmarks/prefix.py [MODEL ...]

A context of CONTEXT tokens that all requests share, and QUESTIONS questions of about 20 tokens
behind it, one after the other, as a retrieval service or a long system prompt brings them; with
and without the cache, by turns. For docs/benchmarks/prefix.md.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from llmjax import LLM, SamplingParams
from llmjax.bench.throughput import random_prompts

CONTEXT, QUESTIONS = 2000, 32
MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
SIZES = {"max_model_len": 4096, "max_num_seqs": 8, "background": False}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ask(llm: LLM, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the tokens, and how many of the prompt were cached."""
    began = time.perf_counter()
    first, tokens, cached = 0.0, [], 0
    for piece in llm.stream(prompt, PARAMS):
        first = first or time.perf_counter() - began
        tokens += piece.outputs[0].token_ids
        cached = piece.num_cached_tokens
    return first, tokens, cached


def main() -> None:
    print("| model | prompt tokens from the cache | first token, without | with | saved |")
    print("| :-- | --: | --: | --: | --: |")
    for model in sys.argv[1:] or MODELS:
        with (
            LLM(model, enable_prefix_caching=False, **SIZES) as plain,
            LLM(model, **SIZES) as caching,
        ):
            (context,) = random_prompts(plain.tokenizer, 1, CONTEXT)
            questions = random_prompts(plain.tokenizer, QUESTIONS, 20, seed=1)
            prompts = [context + question for question in questions]
            ask(caching, context)  # whoever asked first has paid for it
            without, with_cache, saved = [], [], []
            for prompt in prompts:
                seconds, tokens, _ = ask(plain, prompt)
                without.append(seconds)
                seconds, same, cached = ask(caching, prompt)
                with_cache.append(seconds)
                saved.append(cached / len(prompt))
                assert same == tokens
            slow, fast = median(without), median(with_cache)
            row = f"{min(saved):.1%}", f"{slow * 1e3:,.0f} ms", f"{fast * 1e3:,.0f} ms"
            print("|", " | ".join((model, *row, f"{1 - fast / slow:.1%}")), "|", flush=True)


if __name__ == "__main__":
    main()
