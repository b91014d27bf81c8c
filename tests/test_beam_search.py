"""Beam search against a search that computes every context anew."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from llmjax import LLM, BeamSearchParams
from llmjax.beam_search import BeamSearch
from llmjax.errors import InvalidRequestError

PROMPT = list(range(40, 63))


@pytest.fixture(scope="module")
def llm(tiny_model):
    sizes = {"max_model_len": 96, "max_num_seqs": 16, "block_size": 4, "background": False}
    with LLM(str(tiny_model), token_buckets=(64,), seq_buckets=(16,), **sizes) as llm:
        yield llm


def by_forward(llm, prompt, params):
    """(score, tokens) of all that a plain search finds, best first."""
    eos = llm.tokenizer.eos_token_ids
    live, done = [((), 0.0)], []
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in live:
            logits = llm.forward([*prompt, *tokens]).logits[-1]
            logprobs = np.asarray(jax.nn.log_softmax(logits))
            for token in np.argsort(-logprobs)[: 2 * params.beam_width].tolist():
                ended = token in eos and not params.ignore_eos
                beam = ((*tokens, token), total + float(logprobs[token]))
                (done if ended else longer).append(beam)
        live = sorted(longer, key=lambda beam: -beam[1])[: params.beam_width]

    def score(beam):
        tokens, total = beam
        ended = tokens[-1] in eos and not params.ignore_eos
        return total / (len(prompt) + len(tokens) - ended) ** params.length_penalty

    return sorted(((score(b), list(b[0])) for b in done + live), reverse=True)[: params.beam_width]


@pytest.mark.parametrize("width", [1, 3, 8])
def test_finds_what_a_plain_search_finds(llm, width):
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=0.8)
    first, second = llm.beam_search([PROMPT, PROMPT[:9]], params)
    for output, prompt in ((first, PROMPT), (second, PROMPT[:9])):
        expected = by_forward(llm, prompt, params)
        assert [choice.token_ids for choice in output.outputs] == [tokens for _, tokens in expected]
        assert len(output.outputs) == width
        for choice, (score, tokens) in zip(output.outputs, expected, strict=True):
            length = len(prompt) + len(tokens) - (choice.finish_reason == "stop")
            assert choice.cumulative_logprob / length**0.8 == pytest.approx(score, abs=1e-4)
    assert llm.engine.stats().pages_used == 0


def test_contexts_come_from_the_cache(llm):
    before = llm.engine.stats()
    llm.beam_search(list(range(60, 100)), BeamSearchParams(beam_width=4, max_tokens=8))
    after = llm.engine.stats()
    queries = after.prefix_queries - before.prefix_queries
    assert (after.prefix_hits - before.prefix_hits) / queries > 0.9


def test_an_end_of_sequence_ends_a_beam():
    search = BeamSearch([1], BeamSearchParams(beam_width=2, max_tokens=3), {9}, 100)
    search.advance([{9: -0.1, 4: -1.0, 5: -2.0}])
    assert search.prompts == [[1, 4], [1, 5]]
    search.advance([{9: -5.0, 6: -1.0}, {7: -0.5, 8: -9.0}])
    search.advance([{2: -1.0}, {3: -0.1}])
    assert search.prompts == []
    first, second = search.best()
    assert (first.token_ids, first.is_done) == ((9,), True)
    assert second.token_ids == (5, 7, 3)


def test_ends_with_the_context():
    search = BeamSearch([1, 2], BeamSearchParams(beam_width=1, max_tokens=50), (), 4)
    search.advance([{3: -1.0}])
    search.advance([{4: -1.0}])
    assert search.prompts == [] and search.best()[0].token_ids == (3, 4)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"beam_width": 0, "max_tokens": 2}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 2, "length_penalty": 99.0}, "length_penalty"),
        ({"beam_width": "2", "max_tokens": 2}, "beam_width"),
    ],
)
def test_values_out_of_range_are_named(values, field):
    with pytest.raises(InvalidRequestError, match=f"^{field} is"):
        BeamSearchParams(**values)


def test_more_beams_than_logprobs_are_refused(llm):
    with pytest.raises(InvalidRequestError, match=r"beam_width is 11, allowed: up to 10"):
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=11, max_tokens=2))
