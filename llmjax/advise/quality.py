"""What quantisation was measured to cost: perplexities, from quality.json beside this file.

A figure there is of one scheme ("weights") or one format of pages ("kv") on one model, with what
the same model has without it ("reference") and where that is written down ("source").
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .schemes import SCHEMES

FILE = Path(__file__).parent / "quality.json"
LIMITS = {"critical": 1.01, "normal": 1.10}
"""How many times the perplexity may become, by accuracy: a choice."""
LOSSLESS = "bfloat16"
"""Of pages: what the others are compared with."""


@dataclass(frozen=True)
class Figure:
    """One that was measured.

    Attributes:
        part: "weights" or "kv".
        name: the scheme, or the format of pages.
        model: on which; as `Model.name`.
    """

    part: str
    name: str
    model: str
    perplexity: float
    reference: float
    source: str

    @property
    def ratio(self) -> float:
        return self.perplexity / self.reference


@dataclass(frozen=True)
class Quality:
    """What is known of one scheme, or one format of pages.

    Attributes:
        ratio: times the perplexity of the model in question; None: not measured on it.
        elsewhere: figures of other models.
    """

    ratio: float | None
    elsewhere: tuple[Figure, ...] = ()

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"{self.ratio:.3f}"
        if not self.elsewhere:
            return "not measured"
        worst = max(self.elsewhere, key=lambda figure: figure.ratio)
        return f"not measured ({worst.ratio:.3f} on {worst.model})"

    @property
    def order(self) -> float:
        """To choose between what is alike otherwise: what was measured first, the least loss."""
        if self.ratio is not None:
            return self.ratio
        return max((figure.ratio for figure in self.elsewhere), default=float("inf"))


@functools.cache
def figures() -> tuple[Figure, ...]:
    """All that were measured."""
    found = []
    for entry in json.loads(FILE.read_text())["figures"]:
        [part] = {"weights", "kv"} & entry.keys()
        found.append(Figure(part, entry.pop(part), **entry))
    return tuple(found)


def known(part: str, name: str, model: str, measured: Sequence[Figure] | None = None) -> Quality:
    """What is known of a scheme (part "weights") or of a format of pages ("kv") for a model.

    Args:
        measured: by default all `figures`.
    """
    if name in ("bf16", LOSSLESS):
        return Quality(1.0)
    fitting = [
        figure
        for figure in (figures() if measured is None else measured)
        if (figure.part, figure.name) == (part, name)
    ]
    own = [figure.ratio for figure in fitting if figure.model == model]
    # Of several the worst: a promise must hold by each of them.
    return Quality(max(own)) if own else Quality(None, tuple(fitting))


def objection(
    scheme: str, kv_dtype: str, weights: Quality, kv: Quality, accuracy: str
) -> str | None:
    """Why a scheme with pages of a format is not accurate enough; None where it is, or may be.

    Args:
        accuracy: a key of `LIMITS`.
    """
    limit = LIMITS[accuracy]
    ratio = (weights.ratio or 1.0) * (kv.ratio or 1.0)
    if ratio > limit:
        return f"measured: {ratio:.3f} times the perplexity, allowed up to {limit}"
    if accuracy != "critical":
        return None
    if weights.ratio is None and SCHEMES[scheme].bits < 8:
        return f"{SCHEMES[scheme].bits} bits a weight, and not measured on this model"
    if kv.ratio is None and kv_dtype != LOSSLESS:
        return f"keys and values in {kv_dtype}, which was not measured on this model"
    return None
