"""Pictures of outcomes: memory and sequences over time, and how latencies are spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .outcome import Outcome

MOST_POINTS = 2000
"""Of a line: more than a picture has pixels across."""


def pyplot() -> Any:
    """matplotlib's, drawing to files.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def require(file: Path) -> None:
    """Raises ConfigError, before there is anything to draw, where it could not be drawn there."""
    types = pyplot().Figure().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in types:
        names = ", ".join(f".{name}" for name in sorted(types))
        raise ConfigError(f"plot is {str(file)!r}, allowed: a name that ends in one of {names}")


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draws all outcomes into one file; of several replicas the first one's memory.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure, ((memory, sequences), (first, gaps)) = pyplot().subplots(
        2, 2, figsize=(10, 6.4), layout="constrained"
    )
    for index, outcome in enumerate(outcomes):
        line, color = outcome.timelines[0], f"C{index}"
        start = np.asarray(line.start)
        every = max(1, len(start) // MOST_POINTS)
        at = start[::every]
        stored = np.asarray(line.stored)[::every] / line.capacity
        memory.plot(at, 100 * stored, color=color, label=outcome.name, lw=1)
        sequences.plot(at, np.asarray(line.running)[::every], color=color, lw=1)
        sequences.plot(at, np.asarray(line.waiting)[::every], color=color, lw=0.8, ls=":")
        done = [record for record in outcome.records if record.refused is None]
        _cdf(first, [record.ttft for record in done], color)
        _cdf(gaps, outcome.gaps, color)
    memory.set(xlabel="seconds", ylabel="% of memory", title="Keys and values in memory")
    memory.set_ylim(0, 102)
    memory.legend(frameon=False)
    sequences.set(xlabel="seconds", title="Sequences running (solid) and waiting (dotted)")
    sequences.set_yscale("symlog", linthresh=10)
    sequences.set_ylim(bottom=0)
    first.set(xlabel="seconds to the first token", ylabel="% of requests", xscale="log")
    gaps.set(xlabel="seconds between tokens", ylabel="% of tokens", xscale="log")
    for axes in (memory, sequences, first, gaps):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=80)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write --plot {file}: {error}") from error


def _cdf(axes: Any, seconds: Sequence[float], color: str) -> None:
    if len(seconds):
        share = np.linspace(0, 1, MOST_POINTS // 4)
        ranked = np.quantile(np.asarray(seconds), share, method="inverted_cdf")
        axes.plot(ranked, 100 * share, color=color, lw=1)
