"""Merges by score against the plain definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmjax.tokenizer.scored_merges import merges_by_score

# Few characters, so that tokens are made of tokens; the last two are beyond 16 bits.
TOKENS = st.lists(st.text("ab▁\0😀𐍈", min_size=1, max_size=7), min_size=1, unique=True)


def by_definition(tokens, scores, joined):
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i in sorted(np.flatnonzero(joined), key=lambda i: -scores[i]):
        splits = ((tokens[i][:cut], tokens[i][cut:]) for cut in range(1, len(tokens[i])))
        halves = [(left, right) for left, right in splits if left in ids and right in ids]
        merges += sorted(halves, key=lambda pair: ids[pair[0]])
    return merges


@given(TOKENS, st.data())
def test_every_split_into_tokens_is_a_merge_those_of_the_best_token_first(tokens, data):
    def each(values):
        return data.draw(st.lists(values, min_size=len(tokens), max_size=len(tokens)))

    scores, joined = each(st.sampled_from([-2.0, -1.0, 0.0])), np.array(each(st.booleans()))
    found = merges_by_score(tokens, scores, joined)
    assert found == by_definition(tokens, scores, joined)
