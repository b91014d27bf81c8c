"""What all architectures read alike from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import CheckpointFormatError, UnsupportedModelError, WeightMismatchError
from .config import DecoderConfig
from .hf_config import FULL, SLIDING, windows
from .rope_config import extended_length, gguf_rope


def gguf_layer_types(m: Mapping[str, Any], slides: Callable[[int], bool]) -> tuple[str, ...]:
    """The file's sliding_window_pattern, else by the family's rule.

    The pattern is a boolean a layer, or a number n: every n-th layer has no window.
    """
    arch, pattern = m["general.architecture"], gguf_key(m, "attention.sliding_window_pattern", None)
    count = m[f"{arch}.block_count"]
    if isinstance(pattern, int):
        return tuple(FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count))
    if pattern is not None:
        return tuple(SLIDING if slides else FULL for slides in pattern)
    return tuple(SLIDING if slides(i) else FULL for i in range(count))


def read_gguf_decoder(
    m: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    types: Sequence[str] = (),
    window: int | None = None,
    **settings: Any,
) -> DecoderConfig:
    """A DecoderConfig of the keys that all architectures share, changed by `settings`.

    Args:
        m: metadata, and the values of `ROPE_TENSORS` under their names.
        types, window, settings: as `hf_config.read_decoder` takes them.

    Raises:
        UnsupportedModelError: a mixture of experts, layers of unequal shape, or a rope
            scaling that is not implemented.
        CheckpointFormatError: a required key is missing.
    """
    if gguf_key(m, "expert_count", 0):
        raise UnsupportedModelError(
            f"a mixture of experts ({gguf_key(m, 'expert_count')} of them) is not implemented"
        )
    if "token_embd.weight" not in tensors:
        raise WeightMismatchError(["token_embd.weight"], [], [])
    heads, hidden = gguf_key(m, "attention.head_count"), gguf_key(m, "embedding_length")
    head_dim = gguf_key(m, "attention.key_length", hidden // heads)
    layers, length = gguf_key(m, "block_count"), gguf_key(m, "context_length")
    types = types or (FULL,) * layers
    if "ropes" not in settings:
        rope = gguf_rope(m, tensors, head_dim)
        settings["ropes"] = (rope,) * layers
        length = extended_length(rope, length)
    fields = {
        "architecture": m["general.architecture"],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": gguf_key(m, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "mlp_size": gguf_key(m, "feed_forward_length"),
        "max_position": length,
        "norm_eps": gguf_key(m, "attention.layer_norm_rms_epsilon"),
        "windows": windows(types, window, length),
        "attention_scale": head_dim**-0.5,
        "tie_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    return DecoderConfig(**fields | settings)


_NEEDED = object()


def gguf_key(m: Mapping[str, Any], key: str, default: Any = _NEEDED) -> Any:
    """The architecture's own value of `key`.

    Raises:
        CheckpointFormatError: it is missing and has no default.
        UnsupportedModelError: it differs from layer to layer.
    """
    name = f"{m['general.architecture']}.{key}"
    value = m.get(name, default)
    if value is _NEEDED:
        raise CheckpointFormatError(f"GGUF metadata has no {name!r}")
    if isinstance(value, list) and not key.endswith("pattern"):
        if len(set(value)) != 1:
            raise UnsupportedModelError(f"{name} differs from layer to layer: {value}")
        return value[0]
    return value
