"""What a method is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import Checkpoint
from .config import QuantizeConfig


@dataclass(frozen=True)
class Job:
    """One model to quantise.

    Attributes:
        source: open; nothing but headers has been read.
        dst: what to write, a file or a folder; does not exist.
        config: how.
        progress: show progress bars on stderr.
    """

    source: Checkpoint
    dst: Path
    config: QuantizeConfig
    progress: bool = True
