"""vLLM's CPU build in process. Usage: vllm_offline.py FOLDER"""

import sys
import time

import worker

if __name__ == "__main__":
    answers = worker.claim_stdout()

    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], max_model_len=1024, enable_prefix_caching=False)
    vocab_size = llm.get_tokenizer().vocab_size

    def seconds(count, input_len, output_len):
        prompts = [
            {"prompt_token_ids": worker.random_ids(input_len, vocab_size)} for _ in range(count)
        ]
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def decode_seconds(streams, steps):
        shorter = seconds(streams, worker.PROMPT_LEN, worker.HEAD_START)
        longer = seconds(streams, worker.PROMPT_LEN, worker.HEAD_START + steps)
        return (longer - shorter) / steps

    about = {"version": f"vLLM {vllm.__version__}"}
    worker.run(answers, about, decode_seconds, lambda tokens: seconds(1, tokens, 1))
