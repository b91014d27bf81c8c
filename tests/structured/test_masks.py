"""Masks of several constraints at once."""

import numpy as np

from llmjax import SamplingParams
from llmjax.structured import GrammarCompiler, constraint, fill_masks
from llmjax.structured_outputs import StructuredOutputs
from llmjax.tokenizer import tokenizer_from_folder


def test_they_are_the_same_however_many_threads_make_them(tiny_model, monkeypatch):
    compiler = GrammarCompiler(tokenizer_from_folder(tiny_model), 320)
    wanted = [StructuredOutputs(regex=regex) for regex in ("[0-9]+", "[a-f]+", "x?y", "é|ü", "..")]
    params = [SamplingParams(structured_outputs=one) for one in wanted]
    params.append(SamplingParams(allowed_token_ids=[3, 64]))
    constraints = [compiler.compile(one).result().start(64) for one in params]
    compiler.close()
    masks, in_threads = {}, []
    fill = constraint.fill_next_token_bitmask_par

    def noted(executor, matchers, masks):
        in_threads.append(len(matchers))
        fill(executor, matchers, masks)

    monkeypatch.setattr(constraint, "fill_next_token_bitmask_par", noted)
    for parallel in (False, True):
        masks[parallel] = np.zeros((len(params), 10), np.int32)
        fill_masks(masks[parallel], list(enumerate(constraints)), parallel=parallel)
    assert in_threads == [4], "the fifth has no choice"
    assert (masks[True] == masks[False]).all()
    assert len({row.tobytes() for row in masks[False]}) == len(params)
