"""Which function does what a method is for.

A method is a module with one function, `write(job)`, and an entry here; what it takes is its entry
in `config.METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..checkpoint import open_checkpoint, resolve_model
from ..errors import ConfigError
from . import gguf, layerwise
from .config import METHODS, QuantizeConfig
from .job import Job

WRITERS: dict[str, Callable[[Job], None]] = {
    **dict.fromkeys(METHODS, layerwise.write),
    "gguf": gguf.write,
}
"""By `QuantizeConfig.family`: writes `job.dst` in whole, or raises LlmjaxError and leaves what it
has beside it, where a further call finds it."""


def produce(
    src: str | Path, dst: str | Path, config: QuantizeConfig, *, progress: bool = True
) -> Path:
    """See `llmjax.quantize.quantize`."""
    dst = Path(dst).expanduser()
    if dst.exists():
        raise ConfigError(f"{dst} exists already; remove it or choose another name")
    source = open_checkpoint(resolve_model(str(src), progress=progress))
    WRITERS[config.family](Job(source, dst, config, progress))
    return dst
