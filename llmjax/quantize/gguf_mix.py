"""Which type each tensor of a GGUF file gets: llama.cpp's mixes, as data.

A mix is a type for all, and rules for kinds of tensors, the first of which that holds is taken.
Source: llama_tensor_get_type_impl, tensor_type_fallback and tensor_allows_quantization in
src/llama-quant.cpp of https://github.com/ggml-org/llama.cpp; `llama_ftype` in include/llama.h.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType


class At(NamedTuple):
    """What a rule may ask for of a tensor.

    Attributes:
        layer: how many of its kind come before it.
        layers: of its kind, as llama.cpp counts them.
        queries_per_kv: query heads that share a key-value head.
        has_importance: whether there is an importance matrix.
    """

    layer: int
    layers: int
    queries_per_kv: int
    has_importance: bool


Rule = tuple[str, Callable[[At], bool]]
"""A type, and where it is taken."""


def _always(at: At) -> bool:
    return True


def _more_bits(at: At) -> bool:
    """The first and the last eighth, and every third layer between: use_more_bits."""
    eighth = at.layers // 8
    return at.layer < eighth or at.layer >= 7 * at.layers // 8 or (at.layer - eighth) % 3 == 2


def _first_eighth(at: At) -> bool:
    return at.layer < at.layers // 8


def _first_sixteenth(at: At) -> bool:
    return at.layer < at.layers // 16


def _shared(at: At) -> bool:
    return at.queries_per_kv >= 4


@dataclass(frozen=True)
class Mix:
    """How a file's matrices are quantised.

    Attributes:
        number: `general.file_type`.
        base: the type of what no rule is for.
        values, down, output_projection: rules for attn_v (and attn_qkv), ffn_down, attn_output.
    """

    number: LlamaFileType
    base: str
    values: tuple[Rule, ...] = ()
    down: tuple[Rule, ...] = ()
    output_projection: tuple[Rule, ...] = ()


_IQ4_VALUES: tuple[Rule, ...] = (("Q5_K", _shared),)
_IQ4_DOWN: tuple[Rule, ...] = (("Q5_K", lambda at: _first_eighth(at) and not at.has_importance),)
_MEDIUM: tuple[Rule, ...] = (("Q6_K", _more_bits),)


def _guarded(type_name: str) -> tuple[Rule, ...]:
    """Of ffn_down in mixes of old types, whose first layers go astray with importance."""
    return ((type_name, lambda at: _first_eighth(at) and at.has_importance),)


MIXES: dict[str, Mix] = {
    "F32": Mix(LlamaFileType.ALL_F32, "F32"),
    "F16": Mix(LlamaFileType.MOSTLY_F16, "F16"),
    "BF16": Mix(LlamaFileType.MOSTLY_BF16, "BF16"),
    "Q4_0": Mix(LlamaFileType.MOSTLY_Q4_0, "Q4_0", down=_guarded("Q4_1")),
    "Q4_1": Mix(LlamaFileType.MOSTLY_Q4_1, "Q4_1"),
    "Q5_0": Mix(LlamaFileType.MOSTLY_Q5_0, "Q5_0", down=_guarded("Q5_1")),
    "Q5_1": Mix(LlamaFileType.MOSTLY_Q5_1, "Q5_1"),
    "Q8_0": Mix(LlamaFileType.MOSTLY_Q8_0, "Q8_0"),
    "Q2_K": Mix(
        LlamaFileType.MOSTLY_Q2_K,
        "Q2_K",
        values=(("Q4_K", _shared), ("Q3_K", _always)),
        down=(("Q3_K", _always),),
        output_projection=(("Q3_K", _always),),
    ),
    "Q2_K_S": Mix(
        LlamaFileType.MOSTLY_Q2_K_S,
        "Q2_K",
        values=(("Q4_K", _shared),),
        down=(("Q4_K", _first_eighth),),
    ),
    "Q3_K_S": Mix(LlamaFileType.MOSTLY_Q3_K_S, "Q3_K"),
    "Q3_K_M": Mix(
        LlamaFileType.MOSTLY_Q3_K_M,
        "Q3_K",
        values=(("Q5_K", lambda at: at.layer < 2), ("Q4_K", _always)),
        down=(("Q5_K", _first_sixteenth), ("Q4_K", _always)),
        output_projection=(("Q4_K", _always),),
    ),
    "Q3_K_L": Mix(
        LlamaFileType.MOSTLY_Q3_K_L,
        "Q3_K",
        values=(("Q5_K", _always),),
        down=(("Q5_K", _always),),
        output_projection=(("Q5_K", _always),),
    ),
    "Q4_K_S": Mix(
        LlamaFileType.MOSTLY_Q4_K_S,
        "Q4_K",
        values=(("Q5_K", lambda at: at.layer < 4),),
        down=(("Q5_K", _first_eighth),),
    ),
    "Q4_K_M": Mix(LlamaFileType.MOSTLY_Q4_K_M, "Q4_K", values=_MEDIUM, down=_MEDIUM),
    "Q5_K_S": Mix(LlamaFileType.MOSTLY_Q5_K_S, "Q5_K"),
    "Q5_K_M": Mix(LlamaFileType.MOSTLY_Q5_K_M, "Q5_K", values=_MEDIUM, down=_MEDIUM),
    "Q6_K": Mix(LlamaFileType.MOSTLY_Q6_K, "Q6_K"),
    "IQ4_NL": Mix(LlamaFileType.MOSTLY_IQ4_NL, "IQ4_NL", values=_IQ4_VALUES, down=_IQ4_DOWN),
    "IQ4_XS": Mix(LlamaFileType.MOSTLY_IQ4_XS, "IQ4_XS", values=_IQ4_VALUES, down=_IQ4_DOWN),
}
"""By what stands behind "gguf:"."""

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""Names that llama.cpp takes too."""

NEEDS_IMPORTANCE = ("Q2_K_S",)
"""Mixes that llama.cpp refuses to make without an importance matrix."""


def gguf_mix(name: str) -> Mix:
    """The mix of a name of `MIXES` or `ALIASES`, in capitals or not. Raises KeyError."""
    name = name.upper()
    return MIXES[ALIASES.get(name, name)]


_FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
"""For rows that are no whole blocks of 256."""

_LAYERS_OF_70B = 80
_SEVENTY = ("llama", "qwen2")
"""Architectures of which llama.cpp takes some models for a 70B, whose values get more bits."""


class Shape(NamedTuple):
    """What of a model the choice depends on.

    Attributes:
        architecture: as GGUF calls it.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @property
    def is_70b(self) -> bool:
        """As llama.cpp tells it."""
        if self.architecture not in _SEVENTY or self.num_layers != _LAYERS_OF_70B:
            return False
        return self.architecture != "llama" or self.num_heads != self.num_kv_heads


def choose_types(
    mix: Mix, shape: Shape, tensors: Mapping[str, tuple[int, ...]], *, has_importance: bool
) -> dict[str, str]:
    """The type of each tensor, by its name. What is no matrix is F32 in every file.

    Args:
        tensors: shapes, [out, in], by the names that they have in the file.
    """
    matrices = sorted((n for n, s in tensors.items() if is_quantised(n, s)), key=_in_order)
    if block_size(mix.base) == 1:
        return {name: mix.base if name in matrices else "F32" for name in tensors}
    types = dict.fromkeys(tensors, "F32")
    before: Counter[str] = Counter()
    num_values = sum(_kind(name) == "values" for name in matrices)
    for name in matrices:
        kind, K = _kind(name), tensors[name][1]
        layers = num_values if kind == "values" else shape.num_layers
        at = At(before[kind], layers, shape.num_heads // shape.num_kv_heads, has_importance)
        before[kind] += 1
        if _gives_logits(name, tensors):
            chosen = _type_of_head(mix.base, K)
        else:
            rules: tuple[Rule, ...] = getattr(mix, kind, ())
            chosen = next((type_name for type_name, holds in rules if holds(at)), mix.base)
            if kind == "values" and shape.is_70b and chosen in ("Q3_K", "Q4_K"):
                chosen = "Q5_K"
        types[name] = _fitting(chosen, K)
    return types


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one that llama.cpp quantises: a matrix, no norm."""
    return len(shape) == 2 and name.endswith("weight") and "_norm.weight" not in name


def block_size(type_name: str) -> int:
    """Weights that a type keeps together."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0]


_KINDS = {
    "values": ("attn_v.weight", "attn_qkv.weight"),
    "down": ("ffn_down",),
    "output_projection": ("attn_output.weight",),
}


def _kind(name: str) -> str:
    """The field of `Mix` that has rules for the tensor; "" where none has."""
    return next((k for k, parts in _KINDS.items() if any(p in name for p in parts)), "")


def _gives_logits(name: str, tensors: Mapping[str, tuple[int, ...]]) -> bool:
    is_tied = "output.weight" not in tensors
    return name == "output.weight" or (is_tied and name == "token_embd.weight")


def _type_of_head(base: str, K: int) -> str:
    return "Q8_0" if K % block_size(base) or base == "Q8_0" else "Q6_K"


def _fitting(type_name: str, K: int) -> str:
    smaller = _FALLBACK.get(type_name, type_name)
    return next((t for t in (type_name, smaller) if K % block_size(t) == 0), "F16")


def _in_order(name: str) -> tuple[int, str]:
    layer = re.match(r"blk\.(\d+)\.", name)
    return (int(layer[1]) if layer else -1, name)
