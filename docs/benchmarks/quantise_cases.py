"""What quantise.py makes: the models, and each way to quantise them, ours and the peers'."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OURS, GPTQMODEL, LLMCOMPRESSOR, LLAMACPP = SIDES = (
    "llmjax",
    "gptqmodel",
    "llmcompressor",
    "llama.cpp",
)


@dataclass(frozen=True)
class Model:
    """A model of the catalogue.

    Attributes:
        group: weights that share a scale: SmolLM2's rows of 576 are no whole groups of 128.
        fixture: of tests/oracles/data, whose token ids the first windows are.
    """

    name: str
    title: str
    group: int
    fixture: str | None = None


MODELS = {
    "smollm2": Model(
        "smollm2-135m-instruct", "SmolLM2-135M-Instruct", 64, "smollm2-wikitext2-nll.json"
    ),
    "qwen": Model("qwen2.5-coder-0.5b-instruct", "Qwen2.5-Coder-0.5B-Instruct", 128),
}


@dataclass(frozen=True)
class Case:
    """A way to quantise.

    Attributes:
        method, settings: `llmjax.quantize`'s; calibration text is added.
        peers: what the scripts of `sides` are asked for, as JSON.
        calibrated: where the method can do without text, whether it is given.
    """

    name: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    calibrated: bool = False

    @property
    def sides(self) -> list[str]:
        return [OURS, *self.peers]


def cases(group: int) -> list[Case]:
    """In the order in which they are made: what tells most comes first."""
    return [*_integers(group), *_floats(), *_gguf()]


def _integers(group: int) -> list[Case]:
    grouped = {"group_size": group}
    asymmetric = grouped | {"symmetric": False}
    static = {"desc_act": True, "static_groups": True, "format": "compressed-tensors"}
    int8 = {"num_bits": 8, "strategy": "channel"}

    def gptqmodel(bits: int, **more: Any) -> dict[str, dict[str, Any]]:
        settings = {"bits": bits, "desc_act": False, "sym": True}
        return {GPTQMODEL: settings | grouped | more}

    def int4(modifier: str, symmetric: bool = True) -> dict[str, dict[str, Any]]:
        weights = {"num_bits": 4, "strategy": "group", "symmetric": symmetric} | grouped
        return {LLMCOMPRESSOR: {"modifier": modifier, "weights": weights}}

    def scheme(name: str, modifier: str = "nearest") -> dict[str, dict[str, Any]]:
        return {LLMCOMPRESSOR: {"modifier": modifier, "scheme": name}}

    def int8_static(modifier: str) -> dict[str, dict[str, Any]]:
        inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
        return {LLMCOMPRESSOR: {"modifier": modifier, "weights": int8, "inputs": inputs}}

    awq = {GPTQMODEL: {"bits": 4, "quant_method": "awq", "format": "gemm"} | grouped}
    return [
        Case("int4", "int4", grouped, int4("nearest")),
        Case("int4-asym", "int4", asymmetric, int4("nearest", symmetric=False)),
        Case("gptq", "gptq", grouped, gptqmodel(4)),
        Case("awq", "awq", grouped, awq | int4("awq", symmetric=False)),
        Case("int8-w8a8", "int8", {"activations": "dynamic"}, scheme("W8A8")),
        Case("smoothquant", "smoothquant", {}, scheme("W8A8", "smoothquant")),
        Case("gptq-static", "gptq", grouped | static, int4("gptq")),
        Case("gptq-asym", "gptq", asymmetric, gptqmodel(4, sym=False)),
        Case("gptq-act", "gptq", grouped | {"desc_act": True}, gptqmodel(4, desc_act=True)),
        Case("gptq-3", "gptq", grouped | {"bits": 3}, gptqmodel(3)),
        Case("gptq-8", "gptq", grouped | {"bits": 8}, gptqmodel(8)),
        Case("gptq-2", "gptq", grouped | {"bits": 2}, gptqmodel(2)),
        Case("int8", "int8", {}, {LLMCOMPRESSOR: {"modifier": "nearest", "weights": int8}}),
        Case("int8-static", "int8", {"activations": "static"}, int8_static("nearest")),
        Case(
            "smoothquant-static",
            "smoothquant",
            {"activations": "static"},
            int8_static("smoothquant"),
        ),
    ]


def _floats() -> list[Case]:
    def scheme(name: str) -> dict[str, dict[str, Any]]:
        return {LLMCOMPRESSOR: {"modifier": "nearest", "scheme": name}}

    static = {"granularity": "tensor", "activations": "static"}
    # Inputs that are rounded by blocks of 128 must be whole ones; SmolLM2's are not.
    block = {"granularity": "block", "activations": "none"}
    return [
        Case("fp8", "fp8", {}, scheme("FP8_DYNAMIC")),
        Case("fp8-static", "fp8", static, scheme("FP8")),
        Case("fp8-block", "fp8", block),
        Case("nvfp4", "nvfp4", {}, scheme("NVFP4A16")),
        Case("mxfp4", "mxfp4", {}, scheme("MXFP4A16")),
    ]


def _gguf() -> list[Case]:
    types = ["Q4_K_M", "Q8_0", "Q6_K", "Q5_K_M", "Q4_0", "Q3_K_M", "Q2_K"]
    types += ["Q4_K_S", "Q5_K_S", "Q4_1", "IQ4_NL", "IQ4_XS", "Q3_K_S", "Q3_K_L"]
    plain = [
        Case(f"gguf-{kind}", f"gguf:{kind}", peers={LLAMACPP: {"type": kind}}) for kind in types
    ]
    with_text = [
        Case(f"gguf-{kind}-imatrix", f"gguf:{kind}", calibrated=True)
        for kind in ("Q4_K_M", "Q3_K_M", "Q2_K", "Q4_0")
    ]
    return plain + with_text
