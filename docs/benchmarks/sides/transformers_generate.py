"""generate of transformers, in process. Usage: transformers_generate.py FOLDER"""

import sys
import time

import worker

if __name__ == "__main__":
    answers = worker.claim_stdout()

    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    vocab_size = model.config.vocab_size

    def seconds(count, input_len, output_len):
        ids = torch.tensor([worker.random_ids(input_len, vocab_size) for _ in range(count)])
        lengths = {"max_new_tokens": output_len, "min_new_tokens": output_len}
        began = time.perf_counter()
        model.generate(ids, do_sample=False, pad_token_id=0, **lengths)
        return time.perf_counter() - began

    def decode_seconds(streams, steps):
        shorter = seconds(streams, worker.PROMPT_LEN, worker.HEAD_START)
        longer = seconds(streams, worker.PROMPT_LEN, worker.HEAD_START + steps)
        return (longer - shorter) / steps

    about = {"version": f"transformers {transformers.__version__}"}
    worker.run(answers, about, decode_seconds, lambda tokens: seconds(1, tokens, 1))
