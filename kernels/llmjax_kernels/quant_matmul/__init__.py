"""Products with weights that stay quantised."""

from .coded import coded_exponent, from_coded, quant_format
from .dispatch import format_here, quant_matmul, quant_rows, with_quantised_inputs
from .divided import divided_shapes, join
from .gguf import from_gguf, gguf_quant_format
from .inputs import RANGES, InputFormat, round_rows
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
    "RANGES",
    "InputFormat",
    "QuantFormat",
    "QuantWeight",
    "coded_exponent",
    "divided_shapes",
    "format_here",
    "from_coded",
    "from_gguf",
    "from_packed",
    "gguf_quant_format",
    "join",
    "make_weight",
    "quant_format",
    "quant_matmul",
    "quant_rows",
    "quantise_weight",
    "round_rows",
    "weight_shapes",
    "with_quantised_inputs",
]
