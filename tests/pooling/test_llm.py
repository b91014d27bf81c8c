"""`LLM.embed`, `score` and `rerank` against sentence-transformers' answers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.errors import (
    ConfigError,
    InvalidRequestError,
    QueueFullError,
    ShutdownError,
    UnsupportedModelError,
)

from .conftest import HERE, LONG, QUERY, TEXTS

EMBEDDERS, SCORERS = ("bert", "roberta", "qwen3"), ("bert-scorer", "roberta-scorer")
ROUNDING = 2e-6
"""What sums in another order may move a number of a vector of length 1, or of about as much."""


def vectors(outputs) -> np.ndarray:
    return np.array([output.embedding for output in outputs])


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_those_of_sentence_transformers(pooled, name):
    llm, ref = pooled(name)
    outputs = llm.embed(TEXTS)
    assert [len(o.prompt_token_ids) for o in outputs] == ref["lengths"][:-1].tolist()
    np.testing.assert_allclose(vectors(outputs), ref["texts"], atol=2e-5)
    cut = llm.embed(LONG, truncate_prompt_tokens=-1)[0]
    np.testing.assert_allclose(cut.embedding, ref["long"], atol=2e-5)
    assert len(cut.prompt_token_ids) == llm.pooler.max_model_len
    by_ids = llm.embed([o.prompt_token_ids for o in outputs])
    np.testing.assert_allclose(vectors(by_ids), vectors(outputs), atol=ROUNDING)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_sentence_transformers(pooled, name):
    llm, ref = pooled(name)
    scores = [o.score for o in llm.score(QUERY, TEXTS)]
    np.testing.assert_allclose(scores, ref["scores"], atol=1e-5)
    ranked = llm.rerank(QUERY, TEXTS, top_n=3)
    assert [o.index for o in ranked] == np.argsort(-ref["scores"])[:3].tolist()
    assert [o.document for o in ranked] == [TEXTS[o.index] for o in ranked]
    pairs = [(QUERY, LONG), (LONG, QUERY), (LONG, LONG), (LONG + " fox", LONG)]
    kept = [llm.tokenizer.encode_pair(a, b, 60) for a, b in pairs]
    assert [ids for ids, _ in kept] == ref["truncated_ids"].tolist()
    assert [types for _, types in kept] == ref["truncated_types"].tolist()


def test_prompts_and_shorter_vectors(pooled):
    qwen, ref = pooled("qwen3")
    query = qwen.embed(QUERY, prompt_name="query")[0].embedding
    np.testing.assert_allclose(query, ref["query"], atol=2e-5)
    ranked = qwen.rerank(QUERY, TEXTS)
    similar = ref["texts"] @ ref["query"]
    assert [o.index for o in ranked] == np.argsort(-similar).tolist()
    np.testing.assert_allclose([o.score for o in ranked], np.sort(similar)[::-1], atol=2e-5)
    plain = [o.score for o in qwen.score([QUERY] * len(TEXTS), TEXTS)]
    np.testing.assert_allclose(plain, ref["texts"] @ ref["texts"][2], atol=2e-5)
    bert, ref = pooled("bert")
    short = bert.embed(TEXTS, dimensions=8)
    np.testing.assert_allclose(vectors(short), ref["short"], atol=2e-5)


@pytest.mark.parametrize(("name", "token"), [("roberta", 0), ("qwen3", -1)])
def test_vectors_of_tokens(pooled, name, token):
    """Where one token stands for all, its vector is sentence-transformers' of the text."""
    llm, ref = pooled(name)
    outputs = llm.encode(TEXTS, pooling_task="token_embed")
    np.testing.assert_allclose([o.data[token] for o in outputs], ref["texts"], atol=2e-5)
    assert all(o.data.shape == (len(o.prompt_token_ids), 32) for o in outputs)
    (own,) = llm.encode(outputs[0].prompt_token_ids)
    np.testing.assert_allclose(own.data, outputs[0].data, atol=ROUNDING)
    (cut,) = llm.encode(TEXTS[0], truncate_prompt_tokens=4)
    assert cut.data.shape == (4, 32) and cut.data.dtype == np.float32
    (whole,) = llm.encode(TEXTS[0], pooling_task="embed")
    np.testing.assert_allclose(whole.data, ref["texts"][0], atol=2e-5)


def test_prompts_and_shorter_vectors_of_tokens(pooled):
    qwen, ref = pooled("qwen3")
    (query,) = qwen.encode(QUERY, prompt_name="query")
    np.testing.assert_allclose(query.data[-1], ref["query"], atol=2e-5)
    bert, _ = pooled("bert")
    (whole,), (short,) = bert.encode(TEXTS[0]), bert.encode(TEXTS[0], dimensions=8)
    expected = whole.data[:, :8] / np.linalg.norm(whole.data[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short.data, expected, atol=1e-5)


def test_a_text_alone_has_a_score(pooled):
    llm, _ = pooled("bert-scorer")
    own, asked = llm.encode(TEXTS[:2]), llm.encode(TEXTS[:2], pooling_task="classify")
    scores = np.array([o.data for o in own])
    assert scores.shape == (2, 1) and ((scores > 0) & (scores < 1)).all()
    np.testing.assert_allclose(np.array([o.data for o in asked]), scores, atol=1e-6)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_a_text_is_the_same_alone_and_in_a_crowd(pooled, name):
    """Of lengths around the edges of steps, which are of 32 and of 200 tokens."""
    llm, _ = pooled(name)
    rng = np.random.default_rng(1)
    lengths = (1, 2, 15, 31, 32, 33, 63, 64, 99, 100)
    crowd = [rng.integers(5, 290, n).tolist() for n in lengths]
    together = vectors(llm.embed(crowd))
    alone = vectors([llm.embed(ids)[0] for ids in crowd])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    assert np.abs(together[:-1] - together[1:]).max(axis=1).min() > 0.01


@pytest.mark.parametrize(("family", "pooling"), [("llama3", "last"), ("gemma2", "mean")])
def test_any_decoder_pools_where_it_is_told_to(make_model, family, pooling):
    ref = np.load(HERE.parent / "models" / "fixtures" / family / "ref.npz")
    hidden = ref["hidden"][-1]
    pooled = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
    options = {"pooling": pooling, "token_buckets": (32,), "max_model_len": 32}
    with LLM(str(make_model(family)), **options) as llm:
        got = llm.embed([ref["prompt"], ref["prompt"]])[1].embedding
    np.testing.assert_allclose(got, pooled / np.linalg.norm(pooled), atol=2e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("asked", "param"),
        [
            (lambda llm: llm.embed(""), "texts"),
            (lambda llm: llm.embed([[]]), "texts"),
            (lambda llm: llm.embed([[1, 300]]), "texts"),
            (lambda llm: llm.embed([[-1]]), "texts"),
            (lambda llm: llm.embed([None]), "texts"),
            (lambda llm: llm.embed(LONG), "texts"),
            (lambda llm: llm.embed("a", truncate_prompt_tokens=2), "truncate_prompt_tokens"),
            (lambda llm: llm.embed("a", truncate_prompt_tokens=101), "truncate_prompt_tokens"),
            (lambda llm: llm.embed("a", prompt_name="query"), "prompt_name"),
            (lambda llm: llm.embed("a", dimensions=33), "dimensions"),
            (lambda llm: llm.encode(""), "texts"),
            (lambda llm: llm.encode([[300]]), "texts"),
            (lambda llm: llm.encode("a", pooling_task="sort"), "pooling_task"),
            (lambda llm: llm.encode("a", pooling_task=["embed"]), "pooling_task"),
            (lambda llm: llm.encode("a", dimensions=33), "dimensions"),
            (lambda llm: llm.encode("a", pooling_task="classify"), None),
            (lambda llm: llm.encode("a", pooling_task="classify", dimensions=8), "dimensions"),
            (lambda llm: llm.score(["a", "b"], ["c"]), "text_1"),
            (lambda llm: llm.score("a", []), "text_2"),
            (lambda llm: llm.rerank("a", [""]), "documents"),
            (lambda llm: llm.rerank("a", ["b"], top_n=0), "top_n"),
        ],
    )
    def test_what_cannot_be_embedded(self, pooled, asked, param):
        with pytest.raises(InvalidRequestError) as error:
            asked(pooled("bert")[0])
        assert error.value.param == param

    def test_dimensions_of_a_model_that_was_not_made_for_it(self, pooled):
        with pytest.raises(InvalidRequestError, match="allowed for this model: 32"):
            pooled("roberta")[0].embed("a", dimensions=8)

    @pytest.mark.parametrize("name", ["bert", "bert-scorer"])
    def test_who_pools_does_not_generate(self, pooled, name):
        llm, _ = pooled(name)
        does = "embeds" if name == "bert" else "scores pairs"
        calls = (
            lambda: llm.generate("a", SamplingParams(max_tokens=1)),
            lambda: llm.chat([{"role": "user", "content": "a"}]),
            lambda: next(llm.stream("a")),
            lambda: llm.forward([1]),
        )
        for call in calls:
            with pytest.raises(InvalidRequestError, match=f"does not generate text; it {does}"):
                call()

    def test_who_scores_does_not_embed(self, pooled):
        with pytest.raises(InvalidRequestError, match="has no embeddings"):
            pooled("bert-scorer")[0].embed("a")
        with pytest.raises(InvalidRequestError, match="has no embeddings"):
            pooled("bert-scorer")[0].encode("a", pooling_task="token_embed")
        with pytest.raises(InvalidRequestError, match="prompt_name is 'query', allowed: none"):
            pooled("bert-scorer")[0].encode("a", prompt_name="query")

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
            ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
            ({"trace": "x.json"}, "trace"),
            ({"max_model_len": 129}, "max_model_len"),
            ({"token_buckets": (16,)}, "token_buckets"),
        ],
    )
    def test_options_that_mean_nothing_here(self, options, named):
        with pytest.raises(ConfigError, match=named):
            LLM(str(HERE / "fixtures" / "bert"), **options)

    @pytest.mark.parametrize(
        ("file", "change", "message"),
        [
            ("modules.json", [{"type": "a.Dense", "path": ""}], "allowed: Transformer, Pooling"),
            ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "by weightedmean"),
            ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
            ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
        ],
    )
    def test_models_that_ask_for_what_is_not_there(self, tmp_path, file, change, message):
        folder = shutil.copytree(HERE / "fixtures" / "bert", tmp_path / "bert")
        there = json.loads((folder / file).read_text())
        changed = there + change if isinstance(there, list) else there | change
        (folder / file).write_text(json.dumps(changed))
        with pytest.raises(UnsupportedModelError, match=message):
            LLM(str(folder))


class TestQueue:
    @pytest.fixture
    def llm(self):
        llm = LLM(str(HERE / "fixtures" / "bert"), token_buckets=(128,), max_queue_len=4)
        yield llm
        llm.close()

    def test_it_is_bounded_and_takes_all_or_none(self, llm):
        with pytest.raises(QueueFullError, match="5 more were sent, allowed: 4"):
            llm.embed(["a"] * 5)
        assert len(llm.embed(["a"] * 4)) == 4

    def test_what_is_cancelled_is_not_computed(self, llm):
        engine, texts = llm.pooler, llm.pooler.inputs.embeddings(["one", "two", "three"]).inputs
        with engine._wake:  # the thread waits for this lock to take what is there
            futures = engine.submit(texts)
            assert futures[1].cancel()
        assert [f.result(60).shape for f in (futures[0], futures[2])] == [(32,), (32,)]
        computed = engine.metrics.prompt_tokens._value.get()
        assert computed == len(texts[0].token_ids) + len(texts[2].token_ids)

    def test_a_fault_is_told_to_all_who_wait_and_come(self, llm, monkeypatch):
        def fail(*args):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(llm.pooler, "_pack", fail)
        for _ in range(2):
            with pytest.raises(Exception, match="the engine has stopped: out of memory"):
                llm.embed("a")

    def test_nothing_is_served_once_it_is_closed(self, llm):
        llm.close()
        with pytest.raises(ShutdownError):
            llm.embed("a")
