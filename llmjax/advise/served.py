"""What llmjax itself serves today of what may be advised."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ..config import QUANTIZATIONS, SchedulerConfig
from ..simulate.device import Figures
from ..simulate.shapes import SHAPES
from .estimate import Estimate, scheduler_for
from .model import Model
from .quality import LOSSLESS
from .question import Question
from .schemes import AMPERE

SPECULATION = False
"""Whether the engine drafts and verifies."""
GGUF = ("q8_0", "q4_k_m")
CHECKPOINTS = ("awq", "gptq", "smoothquant")
"""Schemes of folders whose codes stay as they are in Triton's kernels, on any number of GPUs."""


@dataclass(frozen=True)
class Served:
    """Whether llmjax serves a scheme today.

    Attributes:
        how: the command line; where it does not, why.
        needs: what there must be first, if anything.
    """

    today: bool
    how: str
    needs: str | None = None


def served(
    question: Question,
    model: Model,
    figures: Figures,
    scheme: str,
    kv_dtype: str,
    estimate: Estimate | None,
) -> Served:
    """How llmjax serves a scheme with pages of a format on the devices of an estimate."""
    if estimate is None:
        return Served(False, "it does not fit")
    why = _missing(scheme, figures)
    if why is not None:
        return Served(False, why)
    chunk = scheduler_for(question, estimate.batch).prefill_chunk_size
    flags = {
        "--tensor-parallel-size": None if estimate.gpus == 1 else estimate.gpus,
        "--quantization": scheme if scheme in QUANTIZATIONS else None,
        "--dtype": _dtype(scheme, figures),
        # On GPUs without bfloat16 pages are what activations are.
        "--kv-cache-dtype": None if _is_old(figures) and kv_dtype == LOSSLESS else kv_dtype,
        "--max-num-seqs": estimate.batch,
        "--prefill-chunk-size": None if chunk == SchedulerConfig.prefill_chunk_size else chunk,
        "--max-model-len": question.length,
        "--gpu-memory-utilization": question.gpu_memory_utilization,
    }
    name = "MODEL" if question.model in SHAPES else shlex.quote(question.model)
    given = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
    return Served(True, f"llmjax serve {name} {given}", _needed(scheme, model))


def _is_old(figures: Figures) -> bool:
    return 0 < figures.compute_capability < AMPERE


def _dtype(scheme: str, figures: Figures) -> str | None:
    """Where weights stay floats, which: a checkpoint may have them in 32 bits."""
    if scheme != "bf16":
        return None
    return "float16" if _is_old(figures) else "bfloat16"


def _missing(scheme: str, figures: Figures) -> str | None:
    if scheme == "bf16" or scheme in GGUF:
        return None
    if scheme not in (*QUANTIZATIONS, *CHECKPOINTS):
        return f"llmjax keeps {scheme} in a byte a weight, and has no products of FP4"
    if scheme in CHECKPOINTS and _is_old(figures):
        return f"llmjax has kernels for {scheme} from A100 on"
    return None


def _needed(scheme: str, model: Model) -> str | None:
    stored = model.quantised
    if scheme in GGUF:
        return None if stored == scheme.upper() else f"a GGUF file of it in {scheme.upper()}"
    if scheme in CHECKPOINTS:
        own = "compressed-tensors" if scheme == "smoothquant" else scheme
        made = f"a checkpoint of it that `llmjax quantize --method {scheme}` makes"
        return None if stored == own else made
    if scheme in QUANTIZATIONS and stored is not None:
        return f"a checkpoint in floats: this one is {stored}"
    return None
