"""Finds how kernels are best cut on the GPU that is here, by timing."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from tqdm.auto import tqdm

from llmjax_kernels import tuned
from llmjax_kernels.gpu import target
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.triton_call import available

from ..config import CompileConfig, SchedulerConfig
from ..engine.buckets import Buckets
from ..errors import ConfigError
from ..models import DecoderConfig
from .tune_cases import Case, attention_case, attentions_of, product_case, products_of

log = logging.getLogger(__name__)

GAIN = 0.98
"""A shape replaces another if it takes less than this share of its time: not by noise."""
S = TypeVar("S")


def tune(
    config: DecoderConfig,
    quantization: str | None,
    rows: Sequence[int],
    *,
    kv_format: str = "bfloat16",
    max_model_len: int | None = None,
    block_size: int = 16,
    folder: Path | None = None,
) -> Path:
    """Times the attention of a model in the steps of an engine, and its products with quantised
    weights, and writes down what was best after each; the file.

    Args:
        quantization: of the weights; None is floats, whose products are XLA's.
        rows: numbers of tokens in a step, of the products.
        kv_format: of the pages.
        max_model_len: by default the model's own.
        folder: for the file; by default where kernels look.

    Raises:
        ConfigError: there is no GPU on which Triton serves.
    """
    gpu = target()
    if gpu is None or not available():
        raise ConfigError(
            "llmjax tune times kernels on an NVIDIA GPU with Triton (the extra `gpu`), and there "
            "is none here"
        )
    longest = max_model_len or config.max_position
    buckets = Buckets(
        SchedulerConfig(), CompileConfig(), max_model_len=longest, block_size=block_size
    ).all
    attentions = attentions_of(config, KV_FORMATS[kv_format], buckets, block_size)
    cases: list[Case] = [attention_case(args, gpu) for args in attentions]
    if quantization is not None:
        cases += [product_case(args, gpu) for args in products_of(config, quantization, rows)]
    path = tuned.path_of(gpu.kind, folder)
    for case in tqdm(cases, desc="timing kernels"):
        best, before, after = search(case)
        log.info("%s: %s, %.1f us (by rule %.1f)", case.size, best, 1e6 * after, 1e6 * before)
        path = tuned.save(gpu.kind, case.op, {case.size: best._asdict()}, folder)
    return path


def search(case: Case[S]) -> tuple[S, float, float]:
    """The best shape that single steps lead to from the one by rule; what it takes before and
    after.

    Raises:
        ConfigError: the one by rule cannot be computed.
    """
    best = case.start
    known = {best: case.seconds(best)}
    if math.isinf(known[best]):
        raise ConfigError(f"{case.op} {case.size} cannot be computed as {best}")
    before = known[best]
    while True:
        near = list(case.near(best))
        for shape in near:
            if shape not in known:
                known[shape] = case.seconds(shape)
        nearest = min(near, key=known.__getitem__)
        if known[nearest] >= GAIN * known[best]:
            return best, before, known[best]
        best = nearest
