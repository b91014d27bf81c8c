"""What to load."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .checks import check_types, require

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4", "fp8")
POOLINGS = ("mean", "cls", "last", "max")
TOOL_CALL_PARSERS = (
    *("auto", "deepseek_v3", "deepseek_v31", "functiongemma", "gpt_oss", "hermes", "json"),
    *("llama3_json", "mistral", "mistral_args", "pythonic"),
)
REASONING_PARSERS = ("auto", "deepseek_r1", "gpt_oss", "mistral", "qwen3")


def check_weight_types(dtype: str, quantization: str | None) -> None:
    """Raises ConfigError where the two are unknown, or contradict each other."""
    require(dtype in DTYPES, f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    require(
        quantization is None or quantization in QUANTIZATIONS,
        f"quantization is {quantization!r}, allowed: {', '.join(QUANTIZATIONS)}",
    )
    require(
        quantization is None or dtype == "auto",
        f"quantization ({quantization}) says what weights become, and so does dtype ({dtype}), "
        "allowed: one of them",
    )


@dataclass(frozen=True)
class ModelConfig:
    """What to load.

    Attributes:
        model: a catalogue name, a folder, a .gguf file or a hub id.
        dtype: of weights and activations. "auto" leaves the weights as the checkpoint has
            them, quantised ones too where the native CPU kernels run; where XLA serves on a
            CPU it means float32. The native kernels keep activations in float32 always.
        max_model_len: tokens of prompt plus output; by default the model's own limit.
        seed: of requests that bring none; by default a random one.
        served_model_name: the name clients use; by default what `model` says.
        chat_template: text or path of a Jinja template that replaces the model's own.
        quantization: "int8", "int4" or "fp8": weights that the checkpoint has as floats are
            quantised while they are loaded. The first two in groups of 32, for the native CPU
            kernels and NVIDIA GPUs from A100 on; int4 leaves the matrix that gives the logits
            (the embedding too, where the two are one) at int8. "fp8" is for GPUs: E4M3 with a
            scale a row, activations likewise where the GPU multiplies FP8 (from H100 on); the
            embedding and what gives the logits stay as they are.
        tool_call_parser: how the model writes calls of functions in a chat: hermes (Qwen too),
            llama3_json, mistral, mistral_args, pythonic, deepseek_v3, deepseek_v31, gpt_oss,
            functiongemma or json. "auto" goes by the chat template, none reads no calls.
        reasoning_parser: how it writes what it thinks first: deepseek_r1, qwen3, mistral or
            gpt_oss. "auto" goes by the chat template, none leaves it in the answer's content.
        pooling: makes embeddings of the hidden states of a model that would generate, or in
            another way than its files say: their "mean" or "max", that of the first token ("cls")
            or of the last one ("last").
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    quantization: str | None = None
    tool_call_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    pooling: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        check_types(self)
        check_weight_types(self.dtype, self.quantization)
        for name, allowed in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            require(
                value is None or value in allowed,
                f"{name} is {value!r}, allowed: {', '.join(allowed)}, or none",
            )
        require(
            self.pooling is None or self.pooling in POOLINGS,
            f"pooling is {self.pooling!r}, allowed: {', '.join(POOLINGS)}, or none",
        )
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len is {self.max_model_len}, allowed: 2 or more (a token in, a token out)",
        )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model
