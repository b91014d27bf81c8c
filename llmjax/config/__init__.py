"""Frozen configuration of an engine; every default is stated here and nowhere else."""

from .cache import KV_CACHE_DTYPES, CacheConfig
from .checks import check_types
from .engine import PARTS, EngineConfig, own_fields
from .model import (
    DTYPES,
    POOLINGS,
    QUANTIZATIONS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ModelConfig,
    check_weight_types,
)
from .parallel import PREFILL_ADDRESS, ParallelConfig, PrefillConfig
from .scheduler import CompileConfig, SchedulerConfig

__all__ = [
    "DTYPES",
    "KV_CACHE_DTYPES",
    "PARTS",
    "POOLINGS",
    "PREFILL_ADDRESS",
    "QUANTIZATIONS",
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "CacheConfig",
    "CompileConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "PrefillConfig",
    "SchedulerConfig",
    "check_types",
    "check_weight_types",
    "own_fields",
]
