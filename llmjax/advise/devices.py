"""The figures of a device: its data sheet's, this machine's, or those that the user gives."""

from __future__ import annotations

from dataclasses import replace

from llmjax_kernels.host_memory import total_bytes

from ..simulate.device import DEVICES, Figures
from .question import ALIASES, Question

FLOATS = 1 / 4
"""Of a CPU's 8-bit peak in float32: VNNI multiplies 64 codes where FMA multiplies 16 floats."""


def find_figures(question: Question) -> Figures:
    """Of one device.

    Raises:
        ConfigError: those of a CPU are to be measured, and the native kernels, which do that, are
            not there.
    """
    if question.gpu == "cpu":
        return _cpu(question)
    figures = DEVICES[ALIASES.get(question.gpu, question.gpu)]
    memory, bandwidth = question.memory_gb, question.bandwidth_gbs
    given = [name for name in ("memory_gb", "bandwidth_gbs") if getattr(question, name) is not None]
    return replace(
        figures,
        memory=figures.memory if memory is None else 1e9 * memory,
        bandwidth=figures.bandwidth if bandwidth is None else 1e9 * bandwidth,
        source=f"{figures.source}; given: {', '.join(given)}" if given else figures.source,
    )


def _cpu(question: Question) -> Figures:
    bandwidth, tops = question.bandwidth_gbs, question.int8_tops
    said = "given"
    read, int8 = 1e9 * (bandwidth or 0), 1e12 * (tops or 0)
    if not (bandwidth and tops):
        from ..bench.roofline import measure

        measured = measure()
        read, int8 = read or measured.read, int8 or measured.int8
        said = f"measured with {measured.threads} threads ({measured.instruction_set})"
    memory = 1e9 * question.memory_gb if question.memory_gb else float(total_bytes())
    return Figures(
        memory=memory,
        bandwidth=read,
        peak=FLOATS * int8,
        link=read,
        host_link=read,
        source=f"this machine, {said}; floats at a quarter of the 8-bit peak, an estimate",
        int8=int8,
    )
