"""What all families read alike from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError
from .config import DecoderConfig
from .rope_config import extended_length, hf_rope

FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def layer_types(c: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[str, ...]:
    """The config's layer_types, else by the family's rule: whether layer i has a window."""
    count = required(c, "num_hidden_layers")
    types = tuple(c.get("layer_types") or (SLIDING if slides(i) else FULL for i in range(count)))
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise UnsupportedModelError(
            f"layer types {sorted(unknown)} are not implemented, allowed: {FULL}, {SLIDING}"
        )
    if len(types) != count:
        raise CheckpointFormatError(f"config.json lists {len(types)} layer_types of {count} layers")
    return types


def read_decoder(
    c: Mapping[str, Any],
    *,
    types: Sequence[str] = (),
    window: int | None = None,
    activation_key: str = "hidden_act",
    **settings: Any,
) -> DecoderConfig:
    """A DecoderConfig of the fields that are spelled alike, changed by `settings`.

    Args:
        types: of the layers, see `layer_types`; none: all attend to everything.
        window: sliding window of the layers that have one, the current token counted.
        settings: fields of DecoderConfig that the family sets itself.

    Raises:
        UnsupportedModelError: an activation or rope scaling that is not implemented.
        CheckpointFormatError: a required key is missing.
    """
    heads, hidden = required(c, "num_attention_heads"), required(c, "hidden_size")
    head_dim = c.get("head_dim") or hidden // heads
    layers, length = required(c, "num_hidden_layers"), required(c, "max_position_embeddings")
    types = types or (FULL,) * layers
    if "ropes" not in settings:
        settings["ropes"] = tuple(hf_rope(c, head_dim, kind) for kind in types)
        length = max(extended_length(rope, length) for rope in set(settings["ropes"]))
    fields = {
        "architecture": c["architectures"][0],
        "vocab_size": required(c, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "mlp_size": required(c, "intermediate_size"),
        "max_position": length,
        "norm_eps": required(c, "rms_norm_eps"),
        "windows": windows(types, window, length),
        "attention_scale": head_dim**-0.5,
        "activation": activation(c.get(activation_key) or "silu"),
        "tie_embeddings": c.get("tie_word_embeddings", False),
    }
    return DecoderConfig(**fields | settings)


def refuse(c: Mapping[str, Any], key: str) -> None:
    """Raises UnsupportedModelError where the config turns `key` on."""
    if c.get(key):
        raise UnsupportedModelError(f"{key} ({c[key]!r} in config.json) is not implemented")


def required(c: Mapping[str, Any], key: str) -> Any:
    if c.get(key) is None:
        raise CheckpointFormatError(f"config.json has no {key!r}")
    return c[key]


def windows(types: Sequence[str], window: int | None, length: int) -> tuple[int | None, ...]:
    """Each layer's window; one that no text can leave is none."""
    kept = window if window and window < length else None
    return tuple(kept if kind == SLIDING else None for kind in types)


def activation(name: str) -> str:
    """Our name of an activation. Raises UnsupportedModelError."""
    if name not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"activation {name!r} is not implemented, allowed: {allowed}")
    return _ACTIVATIONS[name]
