"""Quantises a decoder layer by layer, so that memory holds one of them and the calibration text.

What a layer is calibrated with has flown through the layers before it as they have become.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np
from jaxtyping import Float
from tqdm.auto import tqdm

from ..errors import ConfigError
from . import awq, gptq, nearest, smoothquant
from .calibration import calibration_windows
from .config import QuantizeConfig
from .forward import embed
from .hub import Target, as_stored, layer_targets, outer_targets
from .ignored import Ignored
from .job import Job
from .layer import Layer, places_of
from .settings import quantization_config
from .source import Parameters, Source
from .text import hub_settings, write_text_side
from .work import Work

log = logging.getLogger(__name__)

QUANTISE: dict[str, Callable[[Layer, QuantizeConfig], None]] = {
    "gptq": gptq.quantise,
    "awq": awq.quantise,
    "smoothquant": smoothquant.quantise,
    "int8": nearest.quantise,
    "int4": nearest.quantise,
    "fp8": nearest.quantise,
    "nvfp4": nearest.quantise,
    "mxfp4": nearest.quantise,
}
"""By family: quantises every target of a layer."""

HEAD = "lm_head"


def write(job: Job) -> None:
    """Writes a folder as the hub has them; see `writers.WRITERS`."""
    source = Source(job.source)
    config, asked = source.config, job.config
    assert asked.ignore is not None
    rules = Ignored(asked.ignore)
    if HEAD not in rules:
        raise ConfigError(f"ignore is {list(asked.ignore)}, allowed: with {HEAD!r} in it")
    dtype = _dtype(asked, source)
    hub_settings(job.source, config)  # what cannot be said of it is found out first
    with Work(job, 1 + config.num_layers) as work:
        hidden = _begin(job, source, work, dtype)
        bar = tqdm(
            range(work.done - 1, config.num_layers),
            desc=f"quantising ({asked.method})",
            initial=work.done - 1,
            total=config.num_layers,
            unit="layer",
            disable=not job.progress,
        )
        for index in bar:
            layer, targets = _layer(source, index, rules, hidden, dtype)
            QUANTISE[asked.family](layer, asked)
            hidden = layer.outputs()
            left = [*work.ignored, *_left(layer)]
            work.add(_tensors(layer, targets), hidden, left)
        settings = quantization_config(asked, work.ignored)
        write_text_side(job.source, config, work.folder, dtype, settings)
        work.finish()


def _dtype(config: QuantizeConfig, source: Source) -> np.dtype:
    if config.dtype != "auto":
        return np.dtype(getattr(ml_dtypes, config.dtype or "", config.dtype))
    return source.own_dtype or np.dtype(ml_dtypes.bfloat16)


def _begin(
    job: Job, source: Source, work: Work, dtype: np.dtype
) -> Float[np.ndarray, "S T D"] | None:
    """Writes what is of no layer, unless that is done; gives what flows into the next layer."""
    calibrated = job.config.needs_calibration
    if work.done:
        log.info("%s: going on after layer %d", work.folder, work.done - 1)
        return work.hidden() if calibrated else None
    # Read first: a text that is too short ends the run before anything is written.
    windows = None
    if calibrated:
        windows = calibration_windows(job.config, job.source.read_text_side().tokenizer)
    outer = source.outer()
    targets = outer_targets(source.config, {path: v.shape for path, v in outer.items()})
    hidden = None
    if windows is not None:
        [table] = [t for t in targets if "embed.weight" in t.members]
        hidden = embed(as_stored(table, outer, dtype)["embed.weight"], windows, source.config)
    work.add({t.name: t.join(outer).astype(dtype) for t in targets}, hidden, [HEAD])
    return hidden


def _layer(
    source: Source,
    index: int,
    rules: Ignored,
    hidden: Float[np.ndarray, "S T D"] | None,
    dtype: np.dtype,
) -> tuple[Layer, list[Target]]:
    parameters: Parameters = source.layer(index)
    shapes = {path: value.shape for path, value in parameters.items()}
    targets = layer_targets(source.config, index, shapes)
    linears = {f"{linear}.weight" for place in places_of(source.config) for linear in place.linears}

    def is_quantised(target: Target) -> bool:
        return bool(linears & set(target.members)) and target.module not in rules

    layer = Layer(index, source.config, parameters, targets, is_quantised, hidden, dtype)
    return layer, targets


def _left(layer: Layer) -> list[str]:
    """Names of the linear layers that stay in floats."""
    return [t.module for t in layer.floats if layer.parameters[t.members[0]].ndim == 2]


def _tensors(layer: Layer, targets: Iterable[Target]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for target in targets:
        if target.name in layer.coded:
            parts = layer.coded[target.name].tensors
            tensors |= {f"{target.module}.{part}": value for part, value in parts.items()}
        else:
            tensors[target.name] = target.join(layer.parameters).astype(layer.dtype)
    return tensors
