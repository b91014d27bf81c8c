"""Products with weights that stay quantised."""

from .coded import from_coded, quant_format
from .dispatch import format_here, quant_matmul, with_quantised_inputs
from .gguf import from_gguf, gguf_quant_format
from .inputs import InputFormat, round_rows
from .weight import (
    FORMATS,
    QuantFormat,
    QuantWeight,
    from_packed,
    make_weight,
    quantise_weight,
    weight_shapes,
)

__all__ = [
    "FORMATS",
    "InputFormat",
    "QuantFormat",
    "QuantWeight",
    "format_here",
    "from_coded",
    "from_gguf",
    "from_packed",
    "gguf_quant_format",
    "make_weight",
    "quant_format",
    "quant_matmul",
    "quantise_weight",
    "round_rows",
    "weight_shapes",
    "with_quantised_inputs",
]
