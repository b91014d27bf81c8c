"""What advice is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from ..config import check_types
from ..errors import ConfigError
from ..simulate.device import DEVICES, Machine

GOALS = ("throughput", "latency")
ACCURACIES = ("critical", "normal")
ALIASES = {"a100": "a100-80gb"}
"""Other names of devices."""
GPUS = tuple(sorted((DEVICES.keys() - ALIASES.values()) | ALIASES.keys()))
MOST_GPUS = 8
"""That share a model by tensor parallelism: those of one host."""


@dataclass(frozen=True)
class Question:
    """What to serve, where, and what for.

    Attributes:
        model: a folder, a config.json, a .gguf file, a catalogue name or a hub id that is on this
            machine, or a name that `llmjax simulate` knows (llama-3-8b, ...). Headers are read.
        gpu: h100, h200, a100, l4, t4, b200, or cpu: this machine, whose bandwidth and 8-bit peak
            are measured unless they are given.
        goal: "throughput": tokens a second of each GPU. "latency": how soon a lone answer ends.
        accuracy: "critical" takes what was measured to raise the model's perplexity by at most 1%,
            and where it was not measured 8 bits and more a weight, 16 a key or value. "normal"
            takes what was not measured to raise it by more than 10%.
        p99: seconds within which 99 of 100 answers end, from a request's arrival to its last
            token; by default there is no limit.
        input_len: tokens of each prompt.
        output_len: tokens of each answer.
        gpus: devices that share the model; by default up to 8, as few as hold it and keep p99, or
            as many as make most of each of them.
        acceptance: the share of drafted tokens that the model is assumed to accept.
        gpu_memory_utilization: share of each device's memory to fill; by default what an engine
            fills: 0.9 of a GPU's, 0.2 of a host's.
        memory_gb: of each device, in 1e9 bytes, in place of its data sheet's or this machine's.
        bandwidth_gbs: of its memory, in 1e9 bytes a second, likewise.
        int8_tops: 1e12 operations a second of 8 bits, of a cpu, in place of measuring.
        memory_efficiency: share of the bandwidth that a step reaches.
        compute_efficiency: share of the peak that a step reaches.
        step_overhead_ms: of each step, beside bytes and operations.
    """

    model: str
    gpu: str
    goal: str = "throughput"
    accuracy: str = "normal"
    p99: float | None = None
    input_len: int = 1024
    output_len: int = 256
    gpus: int | None = None
    acceptance: float = 0.7
    gpu_memory_utilization: float | None = None
    memory_gb: float | None = None
    bandwidth_gbs: float | None = None
    int8_tops: float | None = None
    memory_efficiency: float = Machine.memory_efficiency
    compute_efficiency: float = Machine.compute_efficiency
    step_overhead_ms: float = 1e3 * Machine.overhead

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        check_types(self)
        allowed = (*GPUS, *(name for name in DEVICES if name not in GPUS))
        for name, values in (("gpu", allowed), ("goal", GOALS), ("accuracy", ACCURACIES)):
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, allowed: {', '.join(values)}"
                )
        if self.gpu != "cpu" and self.int8_tops is not None:
            raise ConfigError(f"int8_tops is {self.int8_tops}, allowed: with gpu cpu")
        most = 1 if self.gpu == "cpu" else MOST_GPUS
        ranges = {
            "gpus": (1, most),
            "input_len": (1, 2**24),
            "output_len": (1, 2**24),
            "acceptance": (0, 1),
            "step_overhead_ms": (0, 1e6),
        }
        for name, (least, greatest) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= greatest:
                raise ConfigError(f"{name} is {value}, allowed: {least} to {greatest:g}")
        positive = ("p99", "memory_gb", "bandwidth_gbs", "int8_tops")
        shares = ("gpu_memory_utilization", "memory_efficiency", "compute_efficiency")
        for name in (*positive, *shares):
            value = getattr(self, name)
            most_of_it = 1 if name in shares else inf
            if value is not None and not (0 < value <= most_of_it and value < inf):
                limit = " up to 1" if name in shares else ""
                raise ConfigError(f"{name} is {value}, allowed: above 0{limit}")

    @classmethod
    def of(cls, **options: Any) -> Question:
        """Raises ConfigError where an option does not exist, or its value is not allowed."""
        unknown = options.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown option(s): {', '.join(sorted(unknown))}")
        return cls(**options)

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.input_len + self.output_len
