"""GGUF files: `--method gguf:TYPE`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_VERSION
from tqdm.auto import tqdm

from llmjax_kernels.gguf_quantise import BLOCKS, quantise_gguf

from ..checkpoint import Checkpoint, TensorInfo
from ..checkpoint.base import FLOAT_TYPES
from ..checkpoint.gguf_write import TensorToWrite, Value, typed, write_gguf
from ..checkpoint.quantising import require_library
from ..errors import CheckpointFormatError, ConfigError
from .config import QuantizeConfig
from .gguf_keys import gguf_family
from .gguf_mix import Shape, choose_types, gguf_mix
from .gguf_source import GgufModel, gguf_model
from .importance import Importance, Kept, measured_importance, read_importance
from .job import Job
from .source import Source

log = logging.getLogger(__name__)

_NO_IMPORTANCE = ("token_embd.weight", "output.weight")
"""What llama.cpp's files may have the wrong size for."""


def write(job: Job) -> None:
    """Writes a file; see `writers.WRITERS`.

    Raises:
        UnsupportedModelError: the model's family or its tokenizer cannot be written as GGUF.
        ConfigError: the file cannot be written, or the importance matrix is of another model.
        CheckpointFormatError: a tensor has values that the format cannot keep.
    """
    mix = gguf_mix(job.config.gguf_type)
    if mix.base in BLOCKS:
        require_library(f"method is {job.config.method!r}")
    _say_if_quantised(job.source)
    source = Source(job.source)
    model = gguf_model(job.source, source)
    importance = _importance(job, source, model)
    config = source.config
    shape = Shape(gguf_family(config)[0], config.num_layers, config.num_heads, config.num_kv_heads)
    types = choose_types(mix, shape, model.shapes, has_importance=bool(importance))
    metadata = dict(model.metadata)
    metadata["general.file_type"] = typed(int(mix.number))
    metadata["general.quantization_version"] = typed(GGML_QUANT_VERSION)
    metadata |= _about_importance(job.config, importance)
    tensors = {
        name: TensorToWrite(
            TensorInfo(model.shapes[name], kind), partial(_data, model, name, kind, importance)
        )
        for name, kind in types.items()
    }
    _write(job, metadata, tensors)
    if job.config.calibration is not None:
        Kept(job).remove()


def _write(job: Job, metadata: Mapping[str, Value], tensors: Mapping[str, TensorToWrite]) -> None:
    partial_file = job.dst.with_name(f"{job.dst.name}.partial")
    total = sum(prod(tensor.info.shape) for tensor in tensors.values())
    try:
        job.dst.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tqdm(
                total=total,
                desc=job.config.method,
                unit="w",
                unit_scale=True,
                disable=not job.progress,
            ) as bar:
                write_gguf(partial_file, metadata, tensors, done=bar.update)
            os.rename(partial_file, job.dst)
        finally:
            partial_file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {job.dst}: {error}") from error


def _data(model: GgufModel, name: str, kind: str, importance: Importance) -> np.ndarray:
    """A tensor's bytes."""
    values = model.values(name)
    try:
        if kind in BLOCKS:
            return quantise_gguf(kind, values, values.shape[1], importance.get(name))
        with np.errstate(over="ignore"):
            rounded = values.astype(FLOAT_TYPES[kind], copy=False)
        if not np.isfinite(rounded.astype(np.float32, copy=False)).all():
            raise ValueError(f"it has values that are not finite in {kind}")
    except ValueError as error:
        raise CheckpointFormatError(f"tensor {name} cannot be {kind}: {error}") from error
    return rounded


def _importance(job: Job, source: Source, model: GgufModel) -> Importance:
    """That of the file or the text that was given; empty without either."""
    config = job.config
    if config.calibration is not None:
        return measured_importance(job, source, model.name_of)
    if config.imatrix is None:
        return {}
    found = read_importance(Path(config.imatrix).expanduser())
    for name in _NO_IMPORTANCE:
        if name in found and name in model.shapes and len(found[name]) != model.shapes[name][-1]:
            del found[name]
    wrong = [
        f"{name} ({len(values)} inputs, not {model.shapes[name][-1]})"
        for name, values in found.items()
        if name in model.shapes and len(values) != model.shapes[name][-1]
    ]
    if wrong or not found.keys() & model.shapes.keys():
        what = f"it has {', '.join(wrong[:5])}" if wrong else "it names none of its tensors"
        raise ConfigError(f"imatrix is {config.imatrix!r}, which is of another model: {what}")
    return found


def _about_importance(config: QuantizeConfig, importance: Importance) -> dict[str, Value]:
    """What llama.cpp says of it in the file."""
    if not importance:
        return {}
    keys: dict[str, str | int] = {"quantize.imatrix.entries_count": len(importance)}
    if config.imatrix is not None:
        keys["quantize.imatrix.file"] = Path(config.imatrix).name
    if config.calibration is not None:
        keys["quantize.imatrix.dataset"] = Path(config.calibration).name
        keys["quantize.imatrix.chunks_count"] = config.num_samples or 0
    return {key: typed(value) for key, value in keys.items()}


def _say_if_quantised(checkpoint: Checkpoint) -> None:
    kinds = {i.type_name for i in checkpoint.tensors.values() if i.type_name not in FLOAT_TYPES}
    if kinds:
        log.warning(
            "%s is quantised already (%s): what that cost is lost in what is written too",
            *(checkpoint.path, ", ".join(sorted(kinds))),
        )
