"""config.json of a decoder whose checkpoint has none (GGUF)."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isclose
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..errors import LlmjaxError, UnsupportedModelError
from ..models.config import DecoderConfig, RopeConfig
from ..models.hf_config import FULL, SLIDING
from ..nn.rope import rotation
from .hub import hub_family

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_LLAMA3_LENGTH = 8192


def hub_config(config: DecoderConfig) -> dict[str, Any]:
    """The object in config.json that reads as this decoder.

    Raises:
        UnsupportedModelError: there is none; says what would read otherwise.
    """
    family = hub_family(config)
    architecture = family.ARCHITECTURES[0]
    if architecture not in _MODEL_TYPES:
        raise UnsupportedModelError(f"{architecture} is not written as a hub's folder")
    written = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": _ACTIVATIONS[config.activation],
        **_positions(config),
        **(_gemma(config) if architecture.startswith("Gemma") else {}),
        **(_granite(config) if architecture.startswith("Granite") else {}),
    }
    try:
        found = family.read_config(written)
    except LlmjaxError as error:
        raise UnsupportedModelError(
            f"{architecture}: config.json cannot say it: {error}"
        ) from error
    differs = differences(found, replace(config, architecture=architecture))
    if differs:
        raise UnsupportedModelError(
            f"{architecture}: config.json has no way to say that {'; '.join(differs)}"
        )
    return written


def _positions(config: DecoderConfig) -> dict[str, Any]:
    slides = [window is not None for window in config.windows]
    full = [rope for rope, sliding in zip(config.ropes, slides, strict=True) if not sliding]
    rope = (full or list(config.ropes))[0]
    positions: dict[str, Any] = {
        "max_position_embeddings": config.max_position,
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(rope),
        "partial_rotary_factor": rope.dim / config.head_dim,
    }
    if any(slides):
        positions["sliding_window"] = next(w for w in config.windows if w is not None)
        positions["layer_types"] = [SLIDING if sliding else FULL for sliding in slides]
        positions["rope_local_base_freq"] = config.ropes[slides.index(True)].theta
    return positions


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.freq_factors:
        alike = [kind for kind in _llama3_kinds(rope) if _rotate_alike(rope, kind)]
        return _scaling(alike[0]) if alike else None
    if rope.kind == "default":
        return None
    known = {k: v for k, v in asdict(rope).items() if v not in (None, ())}
    original = known.pop("original_max_position")
    return {
        **{key: known[key] for key in known if key not in ("theta", "dim", "kind")},
        "rope_type": rope.kind,
        "original_max_position_embeddings": original,
    }


def _llama3_kinds(rope: RopeConfig) -> list[RopeConfig]:
    """What Llama 3.1's scaling may have been, of which GGUF keeps the divisors alone.

    Those of the lowest frequencies are its factor, and one in between tells the original length.
    """
    divisors = np.array(rope.freq_factors)
    factor = float(divisors.max())
    between = np.flatnonzero((divisors > 1) & (divisors < factor))
    lengths = [_LLAMA3_LENGTH]
    if len(between):
        i = int(between[0])
        smooth = (1 / divisors[i] - 1 / factor) / (1 - 1 / factor)
        wave = 2 * np.pi * rope.theta ** (2 * i / rope.dim)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        lengths.insert(0, round(wave * (low + smooth * (high - low))))
    plain = replace(rope, kind="llama3", factor=factor, freq_factors=())
    return [replace(plain, original_max_position=length) for length in lengths]


def _gemma(config: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_activation": _ACTIVATIONS[config.activation],
        "query_pre_attn_scalar": round(config.attention_scale**-2, 6),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
    }


def _granite(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": config.attention_scale,
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logits_scale,
    }


def differences(found: DecoderConfig, wanted: DecoderConfig) -> list[str]:
    """What of a decoder reads otherwise than it was meant, for people."""
    differs = []
    for name, value in vars(wanted).items():
        other = getattr(found, name)
        if name == "ropes":
            same = all(_rotate_alike(a, b) for a, b in set(zip(value, other, strict=True)))
        elif isinstance(value, float) and isinstance(other, float):
            same = isclose(value, other, rel_tol=1e-6)
        else:
            same = value == other
        if not same:
            differs.append(f"{name} is {value!r} (read back as {other!r})")
    return differs


def _rotate_alike(a: RopeConfig, b: RopeConfig) -> bool:
    if a == b:
        return True
    if a.dim != b.dim:
        return False
    longest = max(a.original_max_position, b.original_max_position, 100)
    positions = jnp.array([1, 100, 1, 100], jnp.int32)
    contexts = jnp.array([1, 100, 2 * longest, 3 * longest], jnp.int32)
    one, other = (rotation(rope, positions, contexts) for rope in (a, b))
    return all(np.allclose(x, y, atol=1e-4) for x, y in zip(one, other, strict=True))
