"""What every part of a configuration is checked by."""

from __future__ import annotations

from typing import Any

from ..checks import type_errors
from ..errors import ConfigError


def require(ok: bool, message: str) -> None:
    """Raises ConfigError where something is not so."""
    if not ok:
        raise ConfigError(message)


def check_types(config: Any) -> None:
    """Raises ConfigError where a field of a dataclass is not of its type."""
    for _, message in type_errors(config):
        raise ConfigError(message)
