"""Configs to DecoderConfig: spellings, defaults, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmjax.errors import CheckpointFormatError, UnsupportedModelError, WeightMismatchError
from llmjax.models import FAMILIES, gemma2, gemma3, granite, llama, mistral, olmo2, phi3, qwen2

FIXTURES = Path(__file__).parent / "fixtures"
SPELLINGS = sorted(str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.rglob("spellings.json"))


def spec(name: str, **changes) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text()) | changes


def metadata(arch: str, **changes) -> dict:
    """The least that an architecture's GGUF file says; `__` stands for a dot."""
    keys = {
        "block_count": 12,
        "context_length": 1024,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items()}


TENSORS = {"token_embd.weight": SimpleNamespace(shape=(256, 64))}


def test_no_architecture_has_two_families():
    names = [a for f in FAMILIES for a in (*f.ARCHITECTURES, *f.GGUF_ARCHITECTURES)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_read_the_same(name):
    c = spec(name)
    family = next(f for f in FAMILIES if c["architectures"][0] in f.ARCHITECTURES)
    for other in json.loads((FIXTURES / name / "spellings.json").read_text()):
        assert family.read_config(other) == family.read_config(c)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_phi3_early_names_of_longrope(kind):
    c = spec("phi3/longrope")
    renamed = c | {"rope_scaling": c["rope_scaling"] | {"type": kind}}
    assert phi3.read_config(renamed) == phi3.read_config(c)


@pytest.mark.parametrize(
    ("family", "name", "changes", "named"),
    [
        (llama, "llama2", {"rope_scaling": {"rope_type": "mrope", "factor": 2}}, "mrope"),
        (llama, "llama2", {"hidden_act": "relu2"}, "relu2"),
        (gemma3, "gemma3", {"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        (gemma2, "gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            gemma3,
            "gemma3",
            {"rope_parameters": {"full_attention": None, "sliding_attention": {}}},
            "full_attention",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(family, name, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        family.read_config(spec(name, **changes))


@pytest.mark.parametrize(
    ("family", "name", "changes", "named"),
    [
        (llama, "llama2", {"hidden_size": None}, "hidden_size"),
        (llama, "llama2", {"rope_scaling": {"type": "linear"}}, "factor"),
        (
            llama,
            "rope/longrope",
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1, 2]}},
            "short_factor has 1 values, expected 8",
        ),
        (qwen2, "qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_an_incomplete_config_says_what_it_lacks(family, name, changes, named):
    with pytest.raises(CheckpointFormatError, match=named):
        family.read_config(spec(name, **changes))


@pytest.mark.parametrize(
    ("family", "name", "changes", "length"),
    [
        (llama, "rope", {}, 64),
        (llama, "rope/linear", {}, 256),
        (llama, "rope/dynamic", {}, 128),
        (llama, "rope/yarn", {}, 256),
        (llama, "rope/yarn", {"max_position_embeddings": 512}, 512),
        (llama, "rope/llama3", {}, 256),
        (llama, "rope/longrope", {}, 256),
        (qwen2, "qwen2/yarn", {}, 256),
        (gemma3, "gemma3/linear", {}, 256),
    ],
)
def test_context_length_counts_the_scaling_once(family, name, changes, length):
    assert family.read_config(spec(name, **changes)).max_position == length


@pytest.mark.parametrize(
    ("family", "name", "changes", "windows"),
    [
        (mistral, "mistral", {}, [32, 32]),
        (mistral, "mistral", {"sliding_window": None}, [None, None]),
        (qwen2, "qwen2", {}, [None, None, None]),
        (qwen2, "qwen2", {"use_sliding_window": True}, [None, 32, 32]),
        (gemma2, "gemma2", {}, [32, None, 32, None]),
        (gemma3, "gemma3", {}, [32] * 5 + [None, 32]),
        (gemma3, "gemma3/pattern3", {}, [32, 32, None, 32, 32, None, 32]),
        (phi3, "phi3", {}, [31, 31]),
        # one that no text can leave is none
        (phi3, "phi3/longrope", {}, [None, None]),
    ],
)
def test_windows(family, name, changes, windows):
    assert list(family.read_config(spec(name, **changes)).windows) == windows


def test_gemma_defaults_are_those_of_its_class():
    absent = ("tie_word_embeddings", "query_pre_attn_scalar", "hidden_activation", "head_dim")
    absent += ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")
    c = {k: v for k, v in spec("gemma3").items() if k not in absent}
    config = gemma3.read_config(c)
    assert config.tie_embeddings
    assert (config.head_dim, config.attention_scale) == (256, 1 / 16)
    assert config.activation == "gelu_tanh"
    assert [r.theta for r in config.ropes] == [10_000.0] * 5 + [1_000_000.0, 10_000.0]


def test_gguf_gemma3_pattern_and_local_base_are_known_without_being_written():
    m = metadata("gemma3", attention__key_length=16, attention__sliding_window=32)
    m |= {"gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.factor": 8.0}
    config = gemma3.read_gguf_config(m, TENSORS)
    assert list(config.windows) == ([32] * 5 + [None]) * 2
    assert [(r.theta, r.factor) for r in config.ropes] == ([(10_000.0, 1)] * 5 + [(1e6, 8)]) * 2


def test_gguf_gemma3_pattern_and_local_base_are_read_where_written():
    m = metadata("gemma3", attention__key_length=16, attention__sliding_window=32, block_count=3)
    m |= {"gemma3.rope.freq_base_swa": 5000.0}
    by_number = m | {"gemma3.attention.sliding_window_pattern": 3}
    by_layer = m | {"gemma3.attention.sliding_window_pattern": [True, True, False]}
    for written in (by_number, by_layer):
        config = gemma3.read_gguf_config(written, TENSORS)
        assert list(config.windows) == [32, 32, None]
        assert config.ropes[0].theta == 5000.0


@pytest.mark.parametrize(
    ("family", "arch", "layers"), [(gemma2, "gemma2", 46), (gemma3, "gemma3", 62)]
)
def test_gguf_gemma_27b_scales_attention_by_hidden_over_heads(family, arch, layers):
    m = metadata(arch, attention__key_length=32, attention__sliding_window=32)
    assert family.read_gguf_config(m, TENSORS).attention_scale == 32**-0.5
    m[f"{arch}.block_count"] = layers
    assert family.read_gguf_config(m, TENSORS).attention_scale == 16**-0.5


def test_gguf_phi3_window_of_zero_is_none():
    keys = {"attention__sliding_window": 0, "rope__scaling__original_context_length": 1024}
    m = metadata("phi3", **keys)
    assert set(phi3.read_gguf_config(m, TENSORS).windows) == {None}


def test_gguf_rope_scaling():
    linear = llama.read_gguf_config(metadata("llama", rope__scaling__factor=2.0), TENSORS)
    assert (linear.ropes[0].kind, linear.ropes[0].factor) == ("linear", 2.0)
    assert linear.max_position == 2048
    oldest = llama.read_gguf_config(metadata("llama", rope__scale_linear=2.0), TENSORS)
    assert oldest == linear
    none = {"rope__scaling__type": "none", "rope__scaling__factor": 2.0}
    assert llama.read_gguf_config(metadata("llama", **none), TENSORS).ropes[0].kind == "default"
    yarn = metadata(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=512,
        rope__scaling__yarn_beta_fast=8.0,
    )
    rope = qwen2.read_gguf_config(yarn, TENSORS).ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 512)
    assert (rope.beta_fast, rope.beta_slow) == (8.0, 1.0)


@pytest.mark.parametrize(
    ("family", "m", "error", "named"),
    [
        (llama, metadata("llama", expert_count=8), UnsupportedModelError, "experts"),
        (
            llama,
            metadata("llama", attention__head_count_kv=[2, 4]),
            UnsupportedModelError,
            "llama.attention.head_count_kv",
        ),
        (
            llama,
            metadata("llama", rope__scaling__type="longrope", rope__scaling__factor=2.0),
            UnsupportedModelError,
            "longrope",
        ),
        (
            granite,
            metadata("granite", rope__scaling__finetuned=False),
            UnsupportedModelError,
            "rotary",
        ),
        (olmo2, metadata("olmo2", attention__sliding_window=8), UnsupportedModelError, "OLMo 3"),
    ],
)
def test_gguf_metadata_that_cannot_be_served_is_refused_by_name(family, m, error, named):
    with pytest.raises(error, match=named):
        family.read_gguf_config(m, TENSORS)


def test_gguf_metadata_that_lacks_a_key_or_the_embedding():
    m = metadata("llama")
    with pytest.raises(WeightMismatchError, match=r"token_embd\.weight"):
        llama.read_gguf_config(m, {})
    del m["llama.block_count"]
    with pytest.raises(CheckpointFormatError, match=r"llama\.block_count"):
        llama.read_gguf_config(m, TENSORS)
