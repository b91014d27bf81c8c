"""Runs a decoder over paged keys and values as the engine does: chunks and decodes mixed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from llmjax.models import Decoder
from llmjax.nn.attention import PagedContext
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.layout import PagedKV, make_ragged_batch

PAGE, PAGES_PER_SEQ, TOKENS, CHUNK = 16, 10, 80, 64


class PagedRun:
    """Two sequences in steps of one program, [TOKENS] wide."""

    def __init__(self, model: Decoder):
        graphdef, self.state = nnx.split(model)
        config = model.config

        def step(state, pages, tokens, starts, kv_lens, tables, prompt_lens):
            decoder = nnx.merge(graphdef, state)
            batch = make_ragged_batch(starts, kv_lens, tables, TOKENS, decode_only=False)
            places = [(0, layer) for layer in range(config.num_layers)]
            context = PagedContext(pages, [batch], places)
            lens = jnp.maximum(prompt_lens[batch.token_seqs], batch.positions + 1)
            hidden = decoder.hidden(tokens, batch.positions, lens, context)
            return context.pages, decoder.logits(hidden)

        # compiling is most of the time
        self.step = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
        shape = (2 * PAGES_PER_SEQ, PAGE, config.num_kv_heads, config.head_dim)
        # what is left in a page from before must not matter
        stale = jnp.full(shape, 7.0, jnp.float32)
        self.pages = [
            PagedKV(stale, stale, KV_FORMATS["float32"]) for _ in range(config.num_layers)
        ]
        order = np.random.default_rng(0).permutation(2 * PAGES_PER_SEQ)
        self.tables = order.reshape(2, PAGES_PER_SEQ).astype(np.int32)
        self.lengths = np.zeros(2, np.int32)

    def __call__(self, first: list[int], second: list[int], prompt_lens: tuple[int, int]):
        """Appends tokens to both sequences (none is fine); their logits, [n V] each."""
        counts = np.array([len(first), len(second)])
        tokens = np.zeros(TOKENS, np.int32)
        tokens[: counts.sum()] = [*first, *second]
        self.lengths += counts.astype(np.int32)
        starts = np.array([0, counts[0], counts.sum()], np.int32)
        kv_lens = np.where(counts > 0, self.lengths, 0).astype(np.int32)
        self.pages, logits = self.step(
            self.state,
            self.pages,
            tokens,
            starts,
            kv_lens,
            self.tables,
            np.array(prompt_lens, np.int32),
        )
        return np.asarray(logits[: counts[0]]), np.asarray(logits[counts[0] : counts.sum()])


def run_mixed(
    model: Decoder, ids: list[int], prompt: list[int], decodes: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Prefills `ids` in chunks while `prompt` is prefilled and continued greedily.

    Returns:
        logits [len(ids) V], logits [V] after the prompt, `decodes` greedy tokens.
    """
    run = PagedRun(model)
    lens = (len(ids), len(prompt))
    rows, pending, after_prompt, greedy = [], prompt, None, []
    for start in range(0, max(len(ids), decodes * CHUNK), CHUNK):
        long, short = run(ids[start : start + CHUNK], pending, lens)
        rows.append(long)
        after_prompt = short[-1] if after_prompt is None else after_prompt
        greedy.append(int(short[-1].argmax()))
        pending = greedy[-1:]
    return np.concatenate(rows), after_prompt, greedy
