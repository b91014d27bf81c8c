"""Who runs in a step, and which step programs there are."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_types, require

POLICIES = ("fcfs", "priority", "lpm")


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
        require(
            self.scheduling_policy in POLICIES,
            f"scheduling_policy is {self.scheduling_policy!r}, allowed: {', '.join(POLICIES)}",
        )
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_size"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, allowed: 1 up")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
            f"({self.max_num_seqs}): every running sequence needs a token a step",
        )
        require(
            0 <= self.max_paddings < 1,
            f"max_paddings is {self.max_paddings}, allowed: 0 up to below 1",
        )
        steps = self.num_scheduler_steps
        require(1 <= steps <= 64, f"num_scheduler_steps is {steps}, allowed: 1 to 64")
        margin = self.forecast_margin
        require(
            margin is None or 0 <= margin <= 100,
            f"forecast_margin is {margin}, allowed: 0 to 100, or none",
        )
        mixed, target = self.mixed_prefill_tokens, self.target_itl_ms
        require(mixed is None or mixed >= 1, f"mixed_prefill_tokens is {mixed}, allowed: 1 or more")
        require(
            target is None or 0 < target <= 1e6,
            f"target_itl_ms is {target}, allowed: above 0 up to 1e6",
        )
        require(
            self.max_queue_len is None or self.max_queue_len >= 1,
            f"max_queue_len is {self.max_queue_len}, allowed: 1 or more",
        )
        require(
            self.queue_timeout is None or self.queue_timeout > 0,
            f"queue_timeout is {self.queue_timeout}, allowed: above 0, in seconds",
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
            require(bool(ok), f"{name} is {values}, allowed: distinct positive integers")
