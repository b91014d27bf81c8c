"""Text, stop strings and token ids of streamed pieces, whatever the pieces are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax import SamplingParams
from llmjax.checkpoint import open_checkpoint
from llmjax.engine.outputs import OutputProcessor
from llmjax.request import FinishReason, Request, SequenceDelta, TokenLogprobs


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return open_checkpoint(tiny_model).read_text_side().tokenizer


def run(tokenizer, text, params, *, eos=True):
    """Feeds text's bytes one token at a time; returns the final output and the pieces."""
    processor = OutputProcessor(tokenizer)
    streaming = OutputProcessor(tokenizer)
    request = Request("r", [5], params, frozenset([2]))
    processor.add(request)
    streaming.add(request)
    ids = [*tokenizer.encode(text, add_special_tokens=False), 2]
    pieces, stopped = [], False
    for token in ids:
        reason = FinishReason.STOP if token == 2 and eos else None
        delta = SequenceDelta("r", 0, [token], [], finish_reason=reason)
        processor.process([delta])
        _, stops = streaming.process([delta])
        stopped = bool(stops)
        piece = streaming.output("r", delta=True)
        pieces += piece.outputs
        if piece.finished:
            break
    return processor.output("r", delta=False).outputs[0], pieces, stopped


def test_a_stop_string_over_tokens_is_cut_and_reported(tokenizer):
    params = SamplingParams(stop=["b,c", "zz"])
    final, pieces, stopped = run(tokenizer, "a b,b,cd", params)
    assert (final.text, final.finish_reason, final.stop_reason) == ("a b,", "stop", "b,c")
    assert "".join(p.text for p in pieces) == "a b,"
    assert stopped


def test_tokens_leave_with_their_text(tokenizer):
    _, pieces, _ = run(tokenizer, "a b,xb,", SamplingParams(stop=["b,c"]))
    for piece in pieces[:-1]:
        assert tokenizer.decode(piece.token_ids) == piece.text
    assert "".join(p.text for p in pieces) == "a b,xb,"


def test_included_stop_strings_and_ends(tokenizer):
    params = SamplingParams(stop="b,", include_stop_str_in_output=True)
    assert run(tokenizer, "a b,c", params)[0].text == "a b,"
    params = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert run(tokenizer, "hi", params)[0].text == "hi</s>"
    assert run(tokenizer, "hi", SamplingParams(skip_special_tokens=False))[0].text == "hi"


def test_stop_strings_wait_for_min_tokens(tokenizer):
    params = SamplingParams(stop="b", min_tokens=4)
    assert run(tokenizer, "abababc", params)[0].text == "aba"


def test_prompt_logprobs_come_once_with_the_first_piece(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(Request("r", [5, 6], SamplingParams(prompt_logprobs=0, stop=["ab"])))
    row = TokenLogprobs(6, -1.0, 1, (), ())
    a, c = tokenizer.encode("ac", add_special_tokens=False)
    news = [([a], [row]), ([c], []), ([c], [])]
    pieces = []
    for tokens, rows in news:
        processor.process([SequenceDelta("r", 0, tokens, [], rows)])
        pieces.append(processor.output("r", delta=True))
    held, first, second = pieces
    assert (held.outputs, held.prompt_logprobs) == ([], None)
    assert first.outputs[0].text == "ac"
    assert first.prompt_logprobs[1][6].logprob == -1.0
    assert second.prompt_logprobs is None


texts = st.text(alphabet="ab,é字", max_size=30)


@given(texts, st.lists(st.text(alphabet="ab,é", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_and_never_show_a_stop_string(tokenizer, text, stop):
    final, pieces, _ = run(tokenizer, text, SamplingParams(stop=stop))
    assert "".join(p.text for p in pieces) == final.text
    assert [t for p in pieces for t in p.token_ids] == final.token_ids
    assert sum(p.finish_reason is not None for p in pieces) == 1
    hits = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    assert final.text == (text[: min(hits)[1]] if hits else text)
    assert all("\ufffd" not in p.text for p in pieces)


@pytest.mark.parametrize("least", [0, 5])
def test_tokens_that_come_together_end_where_they_do_one_by_one(tokenizer, least):
    params = SamplingParams(stop="b,", logprobs=0, min_tokens=least)
    request = Request("r", [5], params, frozenset([2]))
    ids = tokenizer.encode("a b,c b,cd", add_special_tokens=False)
    rows = [TokenLogprobs(token, -1.0, 1, (), ()) for token in ids]
    said = []
    for size in (1, 3, 8):
        processor = OutputProcessor(tokenizer)
        processor.add(request)
        for at in range(0, len(ids), size):
            end = at + size
            processor.process([SequenceDelta("r", 0, ids[at:end], rows[at:end])])
        final = processor.output("r", delta=False).outputs[0]
        said.append((final.text, final.token_ids, len(final.logprobs), final.stop_reason))
    assert said[0] == said[1] == said[2]
    assert said[0][0] == ("a b,c " if least else "a ")
