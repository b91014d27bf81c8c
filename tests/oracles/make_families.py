"""Make the tiny models under tests/models/fixtures and transformers' answers for them.

    python tests/oracles/make_families.py [NAME ...]      (torch, transformers, tokenizers)

A fixture is a folder <name>/ with config.json, model.safetensors, ref.npz (see
`tiny.reference`). A folder inside it is a variant: another config.json and ref.npz for the
same weights. spellings.json lists other configs that mean the same; transformers is asked
to agree. Variants of the same weights must differ, else one of their features does nothing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

import numpy as np
from tiny import FIXTURES, load, logits, reference, write_config, write_weights
from tiny_tokenizer import write_tokenizer

COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.46.0",
    "use_cache": True,
    "vocab_size": 256,
}
ABSENT = object()


def config(architecture: str, model_type: str, **changes) -> dict:
    merged = {"architectures": [architecture], "model_type": model_type} | COMMON | changes
    return {key: value for key, value in merged.items() if value is not ABSENT}


@dataclass
class Fixture:
    config: dict
    variants: dict[str, dict] = field(default_factory=dict)
    spellings: dict[str, list[dict]] = field(default_factory=dict)  # by variant, "" the base
    bfloat16: bool = False
    tokenizer: bool = False


def scaled(base: dict, **scaling) -> dict:
    return base | {"rope_scaling": scaling}


def as_rope_parameters(base: dict) -> dict:
    """The spelling of transformers 5: one dict, with the base inside."""
    rest = {k: v for k, v in base.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = dict(base.get("rope_scaling") or {"rope_type": "default"})
    scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
    return rest | {"rope_parameters": scaling | {"rope_theta": base["rope_theta"]}}


def as_type(base: dict) -> dict:
    scaling = dict(base["rope_scaling"])
    return base | {"rope_scaling": {"type": scaling.pop("rope_type")} | scaling}


def llama(**changes) -> dict:
    extra = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
    return config("LlamaForCausalLM", "llama", **extra | changes)


def llama_family() -> dict[str, Fixture]:
    llama3 = scaled(
        llama(tie_word_embeddings=True, head_dim=16, rope_theta=500000.0),
        factor=8.0,
        high_freq_factor=4.0,
        low_freq_factor=1.0,
        original_max_position_embeddings=64,
        rope_type="llama3",
    )
    smollm2 = llama(
        tie_word_embeddings=True,
        num_attention_heads=3,
        num_key_value_heads=1,
        hidden_size=48,
        rope_theta=100000,
        rope_scaling=None,
        rope_interleaved=False,
        is_llama_config=True,
        torch_dtype="bfloat16",
        vocab_size=320,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    )
    return {
        "llama2": Fixture(
            llama(num_key_value_heads=ABSENT, rms_norm_eps=1e-6, rope_theta=ABSENT),
        ),
        "llama3": Fixture(llama3, spellings={"": [as_type(llama3), as_rope_parameters(llama3)]}),
        "llama_bias": Fixture(llama(attention_bias=True, mlp_bias=True)),
        "smollm2": Fixture(smollm2, bfloat16=True, tokenizer=True),
    }


def rope() -> dict[str, Fixture]:
    """One small Llama under every RoPE scaling; the original length is 64, the text 160."""
    base = llama(head_dim=16, intermediate_size=48, max_position_embeddings=64)
    long = base | {"max_position_embeddings": 256}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    short_factor = [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.6]
    long_factor = [1.0, 1.3, 1.9, 2.8, 3.6, 4.0, 4.4, 5.0]
    longrope = {
        "rope_type": "longrope",
        "short_factor": short_factor,
        "long_factor": long_factor,
        "original_max_position_embeddings": 64,
    }
    variants = {
        "linear": scaled(base, rope_type="linear", factor=4.0),
        "dynamic": scaled(base, rope_type="dynamic", factor=2.0),
        "llama3": scaled(
            long,
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        "yarn": scaled(base, **yarn),
        "yarn_betas": scaled(long, **yarn, beta_fast=2.0, beta_slow=0.2),
        "yarn_no_truncate": scaled(long, **yarn, truncate=False),
        "yarn_mscale": scaled(long, **yarn, mscale=1.5, mscale_all_dim=0.7),
        "yarn_attention_factor": scaled(long, **yarn, attention_factor=1.4),
        "longrope": scaled(long, **longrope),
        "longrope_factor": scaled(long, **longrope, factor=16.0),
        "longrope_attention_factor": scaled(long, **longrope, attention_factor=1.4),
    }
    spellings = {k: [as_type(v), as_rope_parameters(v)] for k, v in variants.items()}
    # both keys at once, as many configs on the hub have it
    spellings["yarn"].append(scaled(base, **yarn, type="yarn"))
    return {"rope": Fixture(base, variants, spellings)}


def mistral() -> dict[str, Fixture]:
    base = config(
        "MistralForCausalLM", "mistral", head_dim=16, sliding_window=32, rope_theta=1000000.0
    )
    return {
        "mistral": Fixture(
            base,
            {"full": base | {"sliding_window": None}},
            {"": [as_rope_parameters(base)]},
        )
    }


def qwen() -> dict[str, Fixture]:
    window = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
    qwen2 = config(
        "Qwen2ForCausalLM",
        "qwen2",
        tie_word_embeddings=True,
        num_hidden_layers=3,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        **window,
    )
    windowed = qwen2 | {"use_sliding_window": True}
    layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}
    qwen3 = config(
        "Qwen3ForCausalLM",
        "qwen3",
        head_dim=24,
        attention_bias=False,
        tie_word_embeddings=True,
        num_hidden_layers=3,
        rope_theta=1000000,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        **window,
    )
    return {
        "qwen2": Fixture(
            qwen2,
            {
                "window": windowed,
                "yarn": qwen2 | {"max_position_embeddings": 64, "rope_scaling": yarn},
            },
            {
                "": [as_rope_parameters(qwen2)],
                "window": [as_rope_parameters(windowed) | {"layer_types": layer_types}],
            },
        ),
        "qwen25": Fixture(
            config("Qwen2ForCausalLM", "qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6, **window)
        ),
        "qwen3": Fixture(
            qwen3,
            {"window": qwen3 | {"use_sliding_window": True}},
            {"": [as_rope_parameters(qwen3)]},
        ),
    }


def gemma() -> dict[str, Fixture]:
    # the hub's Gemma configs leave tie_word_embeddings out: true is the family's default
    both = {
        "tie_word_embeddings": ABSENT,
        "hidden_act": ABSENT,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "sliding_window": 32,
        "cache_implementation": "hybrid",
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    gemma2 = config(
        "Gemma2ForCausalLM",
        "gemma2",
        **both | {"hidden_act": "gelu_pytorch_tanh"},
        head_dim=16,
        num_hidden_layers=4,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
    )
    gemma3 = config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        **both,
        head_dim=24,
        intermediate_size=32,
        num_hidden_layers=7,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        rope_theta=1000000.0,
        rope_local_base_freq=5000.0,
        rope_scaling=None,
        sliding_window_pattern=6,
    )
    linear = scaled(gemma3, factor=8.0, rope_type="linear") | {"rope_local_base_freq": 10000}

    def per_layer_type(base: dict) -> dict:
        """transformers 5: layer_types, and rope_parameters by layer type."""
        dropped = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
        pattern = base["sliding_window_pattern"]
        full = dict(base["rope_scaling"] or {"rope_type": "default"})
        local = {"rope_type": "default", "rope_theta": float(base["rope_local_base_freq"])}
        return {k: v for k, v in base.items() if k not in dropped} | {
            "layer_types": [
                "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
                for i in range(base["num_hidden_layers"])
            ],
            "rope_parameters": {
                "full_attention": full | {"rope_theta": base["rope_theta"]},
                "sliding_attention": local,
            },
        }

    layer_types = ["sliding_attention", "full_attention"] * 2
    defaults = {
        k: v
        for k, v in linear.items()
        if k not in ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")
    }
    pattern3 = gemma3 | {"sliding_window_pattern": 3}
    return {
        "gemma2": Fixture(
            gemma2,
            {
                "no_caps": gemma2
                | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
                # GGUF does not carry the scalar: it is the head's width, 27B apart
                "head_scalar": gemma2 | {"query_pre_attn_scalar": 16},
            },
            {"": [as_rope_parameters(gemma2) | {"layer_types": layer_types}]},
        ),
        "gemma3": Fixture(
            gemma3,
            {"linear": linear, "pattern3": pattern3},
            {
                "": [per_layer_type(gemma3)],
                "linear": [per_layer_type(linear), defaults],
                "pattern3": [per_layer_type(pattern3)],
            },
        ),
    }


def phi3() -> dict[str, Fixture]:
    base = config(
        "Phi3ForCausalLM",
        "phi3",
        attention_bias=False,
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=1,
        original_max_position_embeddings=64,
        max_position_embeddings=64,
        rope_scaling=None,
        sliding_window=31,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    long = {"max_position_embeddings": 256, "sliding_window": 262144}
    factors = {
        "long_factor": [1.0, 1.3, 1.9, 2.8, 3.6, 4.0, 4.4, 5.0],
        "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.6],
    }
    longrope = scaled(base | long, **factors, type="longrope")
    partial = scaled(
        base | long | {"partial_rotary_factor": 0.75},
        type="longrope",
        **{key: value[:6] for key, value in factors.items()},
    )
    as_su = scaled(longrope, **factors, type="su", original_max_position_embeddings=64)
    new_partial = as_rope_parameters(partial)
    new_partial["rope_parameters"]["partial_rotary_factor"] = new_partial.pop(
        "partial_rotary_factor"
    )
    return {
        "phi3": Fixture(
            base,
            {"longrope": longrope, "longrope_partial": partial},
            {
                "": [as_rope_parameters(base)],
                "longrope": [as_su, as_rope_parameters(longrope)],
                "longrope_partial": [new_partial],
            },
        )
    }


def others() -> dict[str, Fixture]:
    return {
        "granite": Fixture(
            config(
                "GraniteForCausalLM",
                "granite",
                attention_bias=False,
                mlp_bias=False,
                tie_word_embeddings=True,
                attention_multiplier=0.2,
                embedding_multiplier=4.0,
                logits_scaling=0.7,
                residual_multiplier=0.6,
                rope_scaling=None,
            )
        ),
        "olmo2": Fixture(
            config("Olmo2ForCausalLM", "olmo2", attention_bias=False, rms_norm_eps=1e-6)
        ),
    }


FAMILIES = (llama_family, rope, mistral, qwen, gemma, phi3, others)
HIDDEN_STATES = ("llama3", "gemma2", "granite", "olmo2")


def make_reference(name: str, variant: str, spec: dict, spellings: list[dict]) -> np.ndarray:
    weights = FIXTURES / name
    folder = weights / variant
    write_config(folder, spec)
    model = load(spec, weights)
    ref = reference(model, f"{name}/{variant}", hidden_states=name in HIDDEN_STATES)
    np.savez_compressed(folder / "ref.npz", **ref)
    for spelling in spellings:
        again = logits(load(spelling, weights), ref["ids"].tolist())[ref["positions"]]
        assert np.abs(again - ref["logits"]).max() < 1e-5, (name, variant, spelling)
    if spellings:
        (folder / "spellings.json").write_text(json.dumps(spellings, indent=1) + "\n")
    # one text for all variants, so that they can be told apart
    return logits(model, list(range(160)))


def make(name: str, fixture: Fixture) -> None:
    write_config(FIXTURES / name, fixture.config)
    write_weights(FIXTURES / name, bfloat16=fixture.bfloat16)
    if fixture.tokenizer:
        write_tokenizer(FIXTURES / name)
    answers = {}
    for variant, spec in {"": fixture.config, **fixture.variants}.items():
        answer = make_reference(name, variant, spec, fixture.spellings.get(variant, []))
        for other, theirs in answers.items():
            gap = np.abs(answer - theirs).max()
            assert gap > 1e-2, f"{name}: {variant!r} and {other!r} differ by {gap} only"
        answers[variant] = answer
    print(name, *answers)


def main() -> None:
    for family in FAMILIES:
        for name, fixture in family().items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                make(name, fixture)


if __name__ == "__main__":
    main()
