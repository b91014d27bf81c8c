"""Which linear layers stay in floats."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..errors import ConfigError

_PATTERN = "re:"


class Ignored:
    """Names as the folder has them ("model.layers.0.mlp.down_proj").

    Args:
        rules: whole names, last parts of names ("down_proj"), or "re:" and a pattern that a name
            begins with, as compressed-tensors takes them.

    Raises:
        ConfigError: a pattern is none.
    """

    def __init__(self, rules: Collection[str]):
        self._names = {rule for rule in rules if not rule.startswith(_PATTERN)}
        self._patterns = []
        for rule in set(rules) - self._names:
            try:
                self._patterns.append(re.compile(rule.removeprefix(_PATTERN)))
            except re.error as error:
                raise ConfigError(f"ignore has {rule!r}, which is no pattern: {error}") from error

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        ends = {".".join(parts[i:]) for i in range(len(parts))}
        return bool(ends & self._names) or any(p.match(module) for p in self._patterns)
