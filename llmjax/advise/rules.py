"""The rules of thumb that advice starts from; arithmetic may overrule them."""

from __future__ import annotations

from dataclasses import dataclass

from ..simulate.device import Figures
from .schemes import AMPERE

HOPPER = 90
"""Compute capability of an H100."""


@dataclass(frozen=True)
class Rule:
    """What is usually done on a kind of device.

    Attributes:
        scheme: a key of `SCHEMES`.
        speculation: whether with speculation.
        text: the rule.
    """

    scheme: str
    speculation: bool
    text: str


def rule_for(figures: Figures, goal: str, accuracy: str) -> Rule:
    """The first that fits."""
    if figures.compute_capability == 0:
        if accuracy == "critical":
            return Rule("q8_0", False, "on a CPU Q8_0 where accuracy is critical")
        return Rule("q4_k_m", False, "on a CPU Q4_K_M")
    if figures.fp4:
        return Rule("nvfp4", False, "FP4 on Blackwell, and only there")
    if figures.compute_capability == HOPPER:
        if goal == "throughput":
            return Rule("fp8", True, "FP8 on Hopper, with speculation where throughput is the goal")
        return Rule("fp8", False, "FP8 on Hopper")
    if figures.compute_capability == AMPERE:
        return Rule("awq", False, "AWQ int4 on an A100")
    return Rule("gptq", False, "GPTQ int4 on other GPUs")
