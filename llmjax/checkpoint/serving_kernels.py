"""Whether the native CPU kernels serve a model, and what can be served then."""

from __future__ import annotations

import logging

from llmjax_kernels.choice import wanted
from llmjax_kernels.native import available
from llmjax_kernels.native.blocks import shape_obstacle
from llmjax_kernels.weight_format import QUANTISATIONS

from ..errors import ConfigError
from ..models import DecoderConfig

log = logging.getLogger(__name__)


def native_obstacle(
    config: DecoderConfig, dtype: str, page_size: int, is_one_device: bool
) -> str | None:
    """What of a model, or of how it is asked for, the native CPU kernels do not do."""
    if not is_one_device:
        return "it is divided over several devices"
    if dtype == "float16":
        return "dtype is float16, and they take float32 and bfloat16"
    return shape_obstacle(config.head_dim, page_size)


def runs_native(obstacle: str | None) -> bool:
    """Whether they serve it; where they are there and do not, the log says why.

    Raises:
        ConfigError: `LLMJAX_KERNELS` insists on them, and they cannot; or it, or `LLMJAX_ISA`, has
            a value that means nothing.
    """
    try:
        is_there, insists = available(), wanted() == "native"
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    if not is_there or obstacle is None:
        return is_there
    if insists:
        raise ConfigError(f"LLMJAX_KERNELS is native, but {obstacle}")
    log.warning("XLA serves, not the native CPU kernels, several times slower: %s", obstacle)
    return False


def check_served(quantization: str, native: bool, triton: bool, obstacle: str | None) -> None:
    """Raises ConfigError where nothing here computes with weights that are so quantised.

    Args:
        native, triton: which kernels serve.
        obstacle: why the native ones do not, where the model is why.
    """
    said = f"quantization is {quantization!r}"
    if native and quantization not in QUANTISATIONS:
        raise ConfigError(f"{said}, allowed on a CPU: {', '.join(QUANTISATIONS)}")
    if not native and not triton:
        why = "" if obstacle is None else f": {obstacle}"
        raise ConfigError(
            f"{said}: only the native CPU kernels take it, and Triton's on NVIDIA GPUs, and XLA "
            f"serves here{why}"
        )
