"""llama.cpp in process, by its own API with whole batches. Usage: llamacpp.py MODEL.gguf

The batch of a step is filled once and only its positions change, logits are fetched and no
token is chosen: what Python and sampling would take is not on its bill.
"""

import os
import sys
import time

import worker

answers = worker.claim_stdout()

import llama_cpp as lc  # noqa: E402

BATCH = 512
THREADS = os.cpu_count()

lc.llama_backend_init()
model = lc.llama_model_load_from_file(sys.argv[1].encode(), lc.llama_model_default_params())
vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))


class Streams:
    """A context of its own, with a prompt in each of its sequences."""

    def __init__(self, count, tokens_each):
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * tokens_each, count
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = THREADS
        self.context = lc.llama_init_from_model(model, params)
        self.count = count

    def forget(self, position):
        """All that is at `position` or after it."""
        memory = lc.llama_get_memory(self.context)
        for sequence in range(self.count):
            lc.llama_memory_seq_rm(memory, sequence, position, -1)

    def decode(self, batch):
        assert lc.llama_decode(self.context, batch) == 0
        lc.llama_get_logits(self.context)


def batch_of(rows):
    """A batch of (token, position, sequence, whether logits are wanted)."""
    batch = lc.llama_batch_init(len(rows), 0, 1)
    for i, (token, position, sequence, logits) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    batch.n_tokens = len(rows)
    return batch


def prompt(length, sequence):
    ids = worker.random_ids(length, vocab_size)
    return batch_of([(token, i, sequence, i == length - 1) for i, token in enumerate(ids)])


decoding = {}
prefilling = Streams(1, 2 * BATCH)


def decode_seconds(count, steps):
    start = worker.PROMPT_LEN
    if count not in decoding:
        decoding[count] = Streams(count, 256)
        for sequence in range(count):
            decoding[count].decode(prompt(start, sequence))
    streams = decoding[count]
    ids = worker.random_ids(count, vocab_size)
    batch = batch_of([(token, start, sequence, True) for sequence, token in enumerate(ids)])
    began = 0.0
    for position in range(start, start + worker.HEAD_START + steps):
        if position == start + worker.HEAD_START:
            began = time.perf_counter()
        for i in range(count):
            batch.pos[i] = position
        streams.decode(batch)
    seconds = time.perf_counter() - began
    streams.forget(start)
    return seconds / steps


def prefill_seconds(tokens):
    batch = prompt(tokens, 0)
    began = time.perf_counter()
    prefilling.decode(batch)
    seconds = time.perf_counter() - began
    prefilling.forget(0)
    return seconds


features = lc.llama_print_system_info().decode()
worker.run(
    answers,
    {"version": f"llama-cpp-python {lc.__version__}", "features": features},
    decode_seconds,
    prefill_seconds,
)
