"""Frozen configuration of an engine; every default is stated here and nowhere else."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from .checks import type_errors
from .errors import ConfigError

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
KV_EVICTIONS = ("streaming", "snapkv")
POLICIES = ("fcfs", "priority", "lpm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4", "fp8")
POOLINGS = ("mean", "cls", "last", "max")
TOOL_CALL_PARSERS = (
    *("auto", "deepseek_v3", "deepseek_v31", "functiongemma", "gpt_oss", "hermes", "json"),
    *("llama3_json", "mistral", "mistral_args", "pythonic"),
)
REASONING_PARSERS = ("auto", "deepseek_r1", "gpt_oss", "mistral", "qwen3")
DEFAULT_KV_BUDGET = 2048
PREFILL_ADDRESS = re.compile(
    r"memory|shm://(?P<name>[\w.-]{1,80})|tcp://(?P<host>[^:/\[\]]+|\[[^\]]+\]):(?P<port>\d{1,5})"
)
"""Where a prefill worker is."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check_types(config: Any) -> None:
    """Raises ConfigError where a field of a dataclass is not of its type."""
    for _, message in type_errors(config):
        raise ConfigError(message)


def check_weight_types(dtype: str, quantization: str | None) -> None:
    """Raises ConfigError where the two are unknown, or contradict each other."""
    _require(dtype in DTYPES, f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    _require(
        quantization is None or quantization in QUANTIZATIONS,
        f"quantization is {quantization!r}, allowed: {', '.join(QUANTIZATIONS)}",
    )
    _require(
        quantization is None or dtype == "auto",
        f"quantization ({quantization}) says what weights become, and so does dtype ({dtype}), "
        "allowed: one of them",
    )


@dataclass(frozen=True)
class ModelConfig:
    """What to load.

    Attributes:
        model: a catalogue name, a folder, a .gguf file or a hub id.
        dtype: of weights and activations. "auto" leaves the weights as the checkpoint has
            them, quantised ones too where the native CPU kernels run; where XLA serves on a
            CPU it means float32. The native kernels keep activations in float32 always.
        max_model_len: tokens of prompt plus output; by default the model's own limit.
        seed: of requests that bring none; by default a random one.
        served_model_name: the name clients use; by default what `model` says.
        chat_template: text or path of a Jinja template that replaces the model's own.
        quantization: "int8", "int4" or "fp8": weights that the checkpoint has as floats are
            quantised while they are loaded. The first two in groups of 32, for the native CPU
            kernels and NVIDIA GPUs from A100 on; int4 leaves the matrix that gives the logits
            (the embedding too, where the two are one) at int8. "fp8" is for GPUs: E4M3 with a
            scale a row, activations likewise where the GPU multiplies FP8 (from H100 on); the
            embedding and what gives the logits stay as they are.
        tool_call_parser: how the model writes calls of functions in a chat: hermes (Qwen too),
            llama3_json, mistral, mistral_args, pythonic, deepseek_v3, deepseek_v31, gpt_oss,
            functiongemma or json. "auto" goes by the chat template, none reads no calls.
        reasoning_parser: how it writes what it thinks first: deepseek_r1, qwen3, mistral or
            gpt_oss. "auto" goes by the chat template, none leaves it in the answer's content.
        pooling: makes embeddings of the hidden states of a model that would generate, or in
            another way than its files say: their "mean" or "max", that of the first token ("cls")
            or of the last one ("last").
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    quantization: str | None = None
    tool_call_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    pooling: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        check_types(self)
        check_weight_types(self.dtype, self.quantization)
        for name, allowed in (
            ("tool_call_parser", TOOL_CALL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            value = getattr(self, name)
            _require(
                value is None or value in allowed,
                f"{name} is {value!r}, allowed: {', '.join(allowed)}, or none",
            )
        _require(
            self.pooling is None or self.pooling in POOLINGS,
            f"pooling is {self.pooling!r}, allowed: {', '.join(POOLINGS)}, or none",
        )
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len is {self.max_model_len}, allowed: 2 or more (a token in, a token out)",
        )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV pool.

    Attributes:
        block_size: tokens in a page.
        num_gpu_blocks_override: pages to allocate instead of what memory would allow.
        gpu_memory_utilization: the share of the device's memory that weights, step
            temporaries and pages may fill together; by default 0.9 of an accelerator, 0.2
            of the host's memory on a CPU, where others work too.
        kv_cache_dtype: how pages keep keys and values. "auto" is what the checkpoint asks for,
            if it does; else bfloat16, but float32 where weights are float32. "int8", "fp8_e4m3"
            and "fp8_e5m2" take half of bfloat16's room and a scale for each token and head.
        enable_prefix_caching: keep what requests have computed for others that begin alike,
            as long as there is room. Choices of one request share their prompt in any case.
        swap_space: GiB of host memory for the pages of preempted requests, where moving them
            there and back takes less time than to compute them again. Replicas share it out.
        kv_offloading_size: GiB of host memory for pages that leave the prefix cache for want
            of room, by the same rule.
        kv_eviction: what a request forgets that gets longer than `kv_budget`; by default nothing.
            "streaming" keeps its first tokens and the most recent ones (attention sinks), and
            `max_model_len` may then exceed what the model was trained for. "snapkv" keeps those
            that attention looks at most (heavy hitters), and a quarter that is recent.
        kv_budget: most tokens of a request whose keys and values are kept with `kv_eviction`;
            by default 2048.
    """

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    swap_space: float = 4.0
    kv_offloading_size: float = 0.0
    kv_eviction: str | None = None
    kv_budget: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        size = self.block_size
        _require(
            1 <= size <= 256 and size & (size - 1) == 0,
            f"block_size is {size}, allowed: a power of two from 1 to 256",
        )
        share = self.gpu_memory_utilization
        _require(
            share is None or 0 < share <= 1,
            f"gpu_memory_utilization is {share}, allowed: above 0 up to 1",
        )
        _require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"kv_cache_dtype is {self.kv_cache_dtype!r}, allowed: {', '.join(KV_CACHE_DTYPES)}",
        )
        for name in ("swap_space", "kv_offloading_size"):
            value = getattr(self, name)
            _require(0 <= value <= 2**20, f"{name} is {value}, allowed: 0 or more GiB")
        blocks = self.num_gpu_blocks_override
        _require(
            blocks is None or blocks >= 1,
            f"num_gpu_blocks_override is {blocks}, allowed: 1 or more",
        )
        eviction, budget = self.kv_eviction, self.kv_budget
        _require(
            eviction is None or eviction in KV_EVICTIONS,
            f"kv_eviction is {eviction!r}, allowed: {', '.join(KV_EVICTIONS)}, or none",
        )
        _require(
            budget is None or eviction is not None,
            f"kv_budget is {budget}, allowed: none, as kv_eviction is none",
        )
        _require(
            budget is None or (budget >= 8 * size and budget % size == 0),
            f"kv_budget is {budget}, allowed: multiples of the block_size ({size}) from "
            f"{8 * size} on",
        )

    @property
    def most_kept(self) -> int:
        """Most tokens of a request that are kept, where `kv_eviction` says what goes."""
        return self.kv_budget or DEFAULT_KV_BUDGET


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs in a step.

    Attributes:
        max_num_seqs: most sequences that run at once, in each replica.
        max_num_batched_tokens: most tokens in one step.
        max_paddings: the share of a step's token bucket that may be padding while prompt
            tokens wait that could fill it.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        prefill_chunk_size: most prompt tokens of one sequence in a step. Without chunking
            neither this limit nor the next two apply.
        mixed_prefill_tokens: most prompt tokens of all sequences together in a step in which
            others decode, as these wait for it; by default `prefill_chunk_size`, which it never
            exceeds.
        target_itl_ms: milliseconds between tokens: prompt tokens beside decodes are as many as
            steps have time for by what they have been measured to take, at least 16 and at most
            `mixed_prefill_tokens` where that is given. By default there is no target.
        forecast_margin: a request is admitted where the pages that all will hold until they
            end, by how long outputs have been, fit with so many standard deviations to spare;
            "none" admits wherever there are pages for the prompt, and preempts later.
        max_queue_len: waiting requests, of all replicas together, beyond which new ones are
            refused; none is no limit.
        queue_timeout: seconds that a request may wait for its turn before it is refused; by
            default there is no limit.
        scheduling_policy: "fcfs": first come, first served. "priority": by the requests'
            priority, a lower number first, then by arrival; higher priority preempts. "lpm":
            first the request of whose prompt the prefix cache has most (longest prefix match).
        fair_users: users that wait share tokens alike, whoever of them has sent most requests;
            within a priority under "priority".
        num_scheduler_steps: decode steps that one program computes before the host has its turn,
            where all sequences decode and none is bound to a grammar. Tokens are the same and come
            in bursts, and a request that arrives waits for up to so many steps. It pays where a
            step takes less than the host's turn, as on GPUs; compiling takes longer.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_paddings: float = 0.1
    enable_chunked_prefill: bool = True
    prefill_chunk_size: int = 512
    mixed_prefill_tokens: int | None = None
    target_itl_ms: float | None = None
    forecast_margin: float | None = 1.5
    max_queue_len: int | None = 4096
    queue_timeout: float | None = None
    scheduling_policy: str = "fcfs"
    fair_users: bool = False
    num_scheduler_steps: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        _require(
            self.scheduling_policy in POLICIES,
            f"scheduling_policy is {self.scheduling_policy!r}, allowed: {', '.join(POLICIES)}",
        )
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, allowed: 1 up")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
            f"({self.max_num_seqs}): every running sequence needs a token a step",
        )
        _require(
            0 <= self.max_paddings < 1,
            f"max_paddings is {self.max_paddings}, allowed: 0 up to below 1",
        )
        steps = self.num_scheduler_steps
        _require(1 <= steps <= 64, f"num_scheduler_steps is {steps}, allowed: 1 to 64")
        margin = self.forecast_margin
        _require(
            margin is None or 0 <= margin <= 100,
            f"forecast_margin is {margin}, allowed: 0 to 100, or none",
        )
        mixed, target = self.mixed_prefill_tokens, self.target_itl_ms
        _require(
            mixed is None or mixed >= 1, f"mixed_prefill_tokens is {mixed}, allowed: 1 or more"
        )
        _require(
            target is None or 0 < target <= 1e6,
            f"target_itl_ms is {target}, allowed: above 0 up to 1e6",
        )
        _require(
            self.max_queue_len is None or self.max_queue_len >= 1,
            f"max_queue_len is {self.max_queue_len}, allowed: 1 or more",
        )
        _require(
            self.queue_timeout is None or self.queue_timeout > 0,
            f"queue_timeout is {self.queue_timeout}, allowed: above 0, in seconds",
        )


@dataclass(frozen=True)
class ParallelConfig:
    """Which devices a model is spread over.

    Attributes:
        tensor_parallel_size: devices that share each layer: its heads, its mlp channels and the
            vocabulary. Any number does: heads that do not divide are copied, or filled up with
            zeros. By XLA alone; the native CPU kernels run on one device.
        data_parallel_size: copies of the model, on as many devices each, between which requests
            are dealt out: to the copy whose prefix cache has most of a prompt, unless others
            have so much less to do that they are done with it sooner.
        pipeline_parallel_size: stages that a model's layers are divided into, each on as many
            devices as `tensor_parallel_size` says. As many steps are under way, each with a
            part of the sequences.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
            size = getattr(self, name)
            _require(1 <= size <= 1024, f"{name} is {size}, allowed: 1 to 1024")
        stages, replicas = self.pipeline_parallel_size, self.data_parallel_size
        _require(
            stages == 1 or replicas == 1,
            f"pipeline_parallel_size is {stages}, allowed with a data_parallel_size of {replicas}: "
            "1",
        )


@dataclass(frozen=True)
class CompileConfig:
    """Which step programs exist.

    Attributes:
        token_buckets: values of T (tokens in a step); by default derived.
        seq_buckets: values of S (sequences in a step); by default derived.
        page_buckets: values of P (pages of a sequence); by default one, the pages of
            `max_model_len`, as attention's cost follows the true lengths anyway.
        background: be ready once the first step programs are compiled, and compile the
            others beside the traffic; otherwise be ready once all are compiled.
        compilation_cache_dir: XLA's persistent cache; by default `LLMJAX_CACHE`/xla.
    """

    token_buckets: tuple[int, ...] | None = None
    seq_buckets: tuple[int, ...] | None = None
    page_buckets: tuple[int, ...] | None = None
    background: bool = True
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("token_buckets", "seq_buckets", "page_buckets"):
            values = getattr(self, name)
            ok = values is None or (values and min(values) >= 1 and len(set(values)) == len(values))
            _require(bool(ok), f"{name} is {values}, allowed: distinct positive integers")


@dataclass(frozen=True)
class PrefillConfig:
    """Prompts computed elsewhere, while this engine decodes.

    Attributes:
        prefill_from: workers that compute prompts and hand over their keys and values:
            "tcp://HOST:PORT" or "shm://NAME" of `llmjax prefill`, or "memory", a second engine
            in this process, for which the KV pool is halved. Of several the least loaded is
            asked. What does not come back in time is computed here.
        prefill_min_tokens: prompts of which fewer tokens are not cached are computed here.
        prefill_timeout: seconds from a request's arrival until its prompt is computed here.
    """

    prefill_from: tuple[str, ...] | None = None
    prefill_min_tokens: int = 256
    prefill_timeout: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.prefill_from, str):
            object.__setattr__(self, "prefill_from", tuple(self.prefill_from.split(",")))
        check_types(self)
        given = tuple(self.prefill_from or ())
        for address in given:
            _require(
                PREFILL_ADDRESS.fullmatch(address) is not None,
                f"prefill_from is {address!r}, allowed: tcp://HOST:PORT, shm://NAME or memory",
            )
        _require(
            len(set(given)) == len(given), f"prefill_from is {given}, allowed: each address once"
        )
        _require(
            self.prefill_min_tokens >= 1,
            f"prefill_min_tokens is {self.prefill_min_tokens}, allowed: 1 or more",
        )
        _require(
            0 < self.prefill_timeout <= 1e6,
            f"prefill_timeout is {self.prefill_timeout}, allowed: above 0 up to 1e6, in seconds",
        )


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
        _require(
            self.cache.kv_eviction is None or self.scheduler.enable_chunked_prefill,
            f"kv_eviction is {self.cache.kv_eviction!r}, allowed without enable_chunked_prefill: "
            "none, as prompts are computed in parts between which tokens are evicted",
        )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            size = getattr(self.parallel, name)
            _require(
                self.cache.kv_eviction is None or size == 1,
                f"kv_eviction is {self.cache.kv_eviction!r}, allowed with a {name} of {size}: none",
            )
        stages = self.parallel.pipeline_parallel_size
        _require(
            stages == 1 or not self.prefill.prefill_from,
            f"prefill_from is {self.prefill.prefill_from}, allowed with a pipeline_parallel_size "
            f"of {stages}: none",
        )
        steps = self.scheduler.num_scheduler_steps
        _require(
            stages == 1 or steps == 1,
            f"num_scheduler_steps is {steps}, allowed with a pipeline_parallel_size of {stages}: "
            "1, as steps in flight are in different stages",
        )
        _require(
            self.cache.kv_eviction is None or not self.prefill.prefill_from,
            f"kv_eviction is {self.cache.kv_eviction!r}, allowed with prefill_from: none, as a "
            "worker hands over whole prompts",
        )
        _require(
            0 <= self.max_logprobs <= 1000,
            f"max_logprobs is {self.max_logprobs}, allowed: 0 to 1000",
        )
        _require(
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
        _require(not options, f"unknown option(s): {', '.join(sorted(options))}")
        return cls(**built)


def own_fields() -> set[str]:
    """Names of the fields of `EngineConfig` that are no parts."""
    return {f.name for f in fields(EngineConfig)} - PARTS.keys()
