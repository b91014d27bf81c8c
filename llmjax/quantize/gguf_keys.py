"""A decoder in GGUF's metadata: the inverse of each family's `read_gguf_config`.

Keys are those of llama.cpp's converters. What they cannot say is found out by reading them back.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and `conversion/` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..checkpoint import TensorInfo
from ..errors import LlmjaxError, UnsupportedModelError
from ..models import FAMILIES
from ..models.config import DecoderConfig, RopeConfig
from ..nn.rope import divisors, rotation
from .hub import hub_family
from .hub_config import differences

_WRITTEN_AS = {"MistralForCausalLM": "llama"}
"""Families that have no GGUF architecture of their own."""
_SWA_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Every so manieth layer has no window, unless the file says otherwise."""
_LOCAL_THETA = 10_000.0


def gguf_family(config: DecoderConfig) -> tuple[str, ModuleType]:
    """The GGUF architecture that a decoder is written as, and the family that reads it.

    Raises:
        UnsupportedModelError: there is none.
    """
    family = hub_family(config)
    own = family.GGUF_ARCHITECTURES
    name = own[0] if own else _WRITTEN_AS.get(family.ARCHITECTURES[0])
    for other in FAMILIES:
        if name in other.GGUF_ARCHITECTURES:
            return str(name), other
    raise UnsupportedModelError(
        f"{config.architecture} cannot be written as GGUF: no architecture there is read as it"
    )


def rope_tensors(config: DecoderConfig) -> dict[str, Float[np.ndarray, " R"]]:
    """The tensors that are settings of its rotary embedding."""
    rope = _global_rope(config)
    if rope.kind == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope.long_factor, np.float32),
            "rope_factors_short.weight": np.array(rope.short_factor, np.float32),
        }
    if rope.kind == "llama3" or rope.freq_factors:
        unscaled = replace(rope, kind="default") if rope.kind != "llama3" else rope
        return {"rope_freqs.weight": divisors(unscaled).astype(np.float32)}
    return {}


def gguf_keys(config: DecoderConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Metadata that reads as this decoder, but for what is of its tokenizer.

    Args:
        tensors: that the file will have, those of `rope_tensors` included.

    Raises:
        UnsupportedModelError: there is none; says what would read otherwise.
    """
    architecture, _ = gguf_family(config)
    keys = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.mlp_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "vocab_size": config.vocab_size,
        **_rope(config),
        **_OWN.get(architecture, lambda config: {})(config),
    }
    named: dict[str, Any] = {"general.architecture": architecture}
    named |= {f"{architecture}.{key}": value for key, value in keys.items()}
    require_alike(named, config, tensors)
    return named


def require_alike(
    metadata: Mapping[str, Any], config: DecoderConfig, tensors: Mapping[str, TensorInfo]
) -> None:
    """Raises UnsupportedModelError where the metadata is not read as this decoder."""
    architecture, family = gguf_family(config)
    settings = {key: _stored(value) for key, value in metadata.items()}
    settings |= {name: value.tolist() for name, value in rope_tensors(config).items()}
    try:
        found = family.read_gguf_config(settings, tensors)
    except LlmjaxError as error:
        raise UnsupportedModelError(
            f"{config.architecture}: GGUF cannot say it: {error}"
        ) from error
    differs = differences(replace(found, architecture=config.architecture), config)
    if differs:
        raise UnsupportedModelError(
            f"{config.architecture} cannot be written as GGUF's {architecture!r}, which has no way "
            f"to say that {'; '.join(differs)}"
        )


def _stored(value: Any) -> Any:
    return float(np.float32(value)) if isinstance(value, float) else value


def _global_rope(config: DecoderConfig) -> RopeConfig:
    """That of layers without a window, where there are any."""
    zipped = zip(config.ropes, _slides(config), strict=True)
    return next((rope for rope, slides in zipped if not slides), config.ropes[0])


def _slides(config: DecoderConfig) -> list[bool]:
    """Whether each layer has a window, or the rotation that goes with one that no text leaves."""
    if _window(config) or len(set(config.ropes)) == 1:
        return [window is not None for window in config.windows]
    return [rope == config.ropes[0] for rope in config.ropes]


def _rope(config: DecoderConfig) -> dict[str, Any]:
    rope = _global_rope(config)
    keys: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": float(rope.theta)}
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
        keys["rope.scaling.original_context_length"] = rope.original_max_position
    if rope.kind == "yarn":
        keys["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        keys["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    if rope.kind == "longrope":
        keys["rope.scaling.original_context_length"] = rope.original_max_position
        zero = jnp.zeros(1, jnp.int32)
        # Which multiplies cosines, and that of nothing is 1.
        keys["rope.scaling.attn_factor"] = float(rotation(rope, zero, zero).cos[0, 0])
    return keys


def _window(config: DecoderConfig) -> int | None:
    return next((window for window in config.windows if window is not None), None)


def _gemma(config: DecoderConfig, period: int) -> dict[str, Any]:
    window = _window(config)
    # A window that no text leaves is none.
    keys: dict[str, Any] = {"attention.sliding_window": window or config.max_position}
    slides, usual = _slides(config), [(i + 1) % period != 0 for i in range(config.num_layers)]
    if any(slides) and slides != usual:
        keys["attention.sliding_window_pattern"] = slides
    for key, cap in (
        ("attn_logit_softcapping", config.attention_softcap),
        ("final_logit_softcapping", config.logits_softcap),
    ):
        if cap is not None:
            keys[key] = float(cap)
    return keys


def _gemma2(config: DecoderConfig) -> dict[str, Any]:
    return _gemma(config, _SWA_PERIODS["gemma2"])


def _gemma3(config: DecoderConfig) -> dict[str, Any]:
    keys = _gemma(config, _SWA_PERIODS["gemma3"])
    zipped = zip(config.ropes, _slides(config), strict=True)
    local = next((rope for rope, slides in zipped if slides), config.ropes[0])
    if local.theta != _LOCAL_THETA:
        keys["rope.freq_base_swa"] = float(local.theta)
    return keys


def _granite(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention.scale": float(config.attention_scale),
        "embedding_scale": float(config.embed_scale),
        "residual_scale": float(config.residual_scale),
        "logit_scale": 1 / config.logits_scale,
    }


def _phi3(config: DecoderConfig) -> dict[str, Any]:
    original = config.ropes[0].original_max_position or config.max_position
    window = _window(config) or 0
    return {
        "attention.sliding_window": window,
        "rope.scaling.original_context_length": original,
    }


_OWN = {"gemma2": _gemma2, "gemma3": _gemma3, "granite": _granite, "phi3": _phi3}
"""What an architecture has beside the keys of all."""
