"""All of an engine's configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from .cache import CacheConfig
from .checks import check_types, require
from .model import ModelConfig
from .parallel import ParallelConfig, PrefillConfig
from .scheduler import CompileConfig, SchedulerConfig

PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "compile": CompileConfig,
    "prefill": PrefillConfig,
}
"""What an EngineConfig is made of, by its field."""


@dataclass(frozen=True)
class EngineConfig:
    """All of an engine's configuration.

    Attributes:
        max_logprobs: most likely tokens that a request may ask for at each position.
        threads: that the native CPU kernels work with; by default one a core.
        trace: file to which a timeline of all steps is written, for ui.perfetto.dev.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    max_logprobs: int = 20
    threads: int | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.trace, os.PathLike):
            object.__setattr__(self, "trace", os.fspath(self.trace))
        check_types(self)
        require(
            self.cache.kv_eviction is None or self.scheduler.enable_chunked_prefill,
            f"kv_eviction is {self.cache.kv_eviction!r}, allowed without enable_chunked_prefill: "
            "none, as prompts are computed in parts between which tokens are evicted",
        )
        stages = self.parallel.pipeline_parallel_size
        require(
            stages == 1 or not self.prefill.prefill_from,
            f"prefill_from is {self.prefill.prefill_from}, allowed with a pipeline_parallel_size "
            f"of {stages}: none",
        )
        steps = self.scheduler.num_scheduler_steps
        require(
            stages == 1 or steps == 1,
            f"num_scheduler_steps is {steps}, allowed with a pipeline_parallel_size of {stages}: "
            "1, as steps in flight are in different stages",
        )
        require(
            self.cache.kv_eviction is None or not self.prefill.prefill_from,
            f"kv_eviction is {self.cache.kv_eviction!r}, allowed with prefill_from: none, as a "
            "worker hands over whole prompts",
        )
        require(
            0 <= self.max_logprobs <= 1000,
            f"max_logprobs is {self.max_logprobs}, allowed: 0 to 1000",
        )
        require(
            self.threads is None or 1 <= self.threads <= 1024,
            f"threads is {self.threads}, allowed: 1 to 1024",
        )

    @classmethod
    def of(cls, model: str, **options: Any) -> EngineConfig:
        """Builds a configuration from flat names: `EngineConfig.of(m, max_num_seqs=8)`.

        Args:
            options: any field of an engine's configuration or of its parts.

        Raises:
            ConfigError: an option does not exist, or its value is not allowed.
        """
        options = {"model": model, **options}
        built: dict[str, Any] = {}
        for name, part in PARTS.items():
            names = {f.name for f in fields(part)} & options.keys()
            built[name] = part(**{n: options.pop(n) for n in names})
        built |= {n: options.pop(n) for n in own_fields() & options.keys()}
        require(not options, f"unknown option(s): {', '.join(sorted(options))}")
        return cls(**built)


def own_fields() -> set[str]:
    """Names of the fields of `EngineConfig` that are no parts."""
    return {f.name for f in fields(EngineConfig)} - PARTS.keys()
