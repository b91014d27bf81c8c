"""Devices, and other engines that share the work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .checks import check_types, require

PREFILL_ADDRESS = re.compile(
    r"memory|shm://(?P<name>[\w.-]{1,80})|tcp://(?P<host>[^:/\[\]]+|\[[^\]]+\]):(?P<port>\d{1,5})"
)
"""Where a prefill worker is."""


@dataclass(frozen=True)
class ParallelConfig:
    """Which devices a model is spread over.

    Attributes:
        tensor_parallel_size: devices that share each layer: its heads, its mlp channels and the
            vocabulary. Any number does: heads that do not divide are copied, channels are filled
            up with zeros. By XLA and Triton; the native CPU kernels run on one device.
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
            require(1 <= size <= 1024, f"{name} is {size}, allowed: 1 to 1024")
        stages, replicas = self.pipeline_parallel_size, self.data_parallel_size
        require(
            stages == 1 or replicas == 1,
            f"pipeline_parallel_size is {stages}, allowed with a data_parallel_size of {replicas}: "
            "1",
        )


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
            require(
                PREFILL_ADDRESS.fullmatch(address) is not None,
                f"prefill_from is {address!r}, allowed: tcp://HOST:PORT, shm://NAME or memory",
            )
        require(
            len(set(given)) == len(given), f"prefill_from is {given}, allowed: each address once"
        )
        require(
            self.prefill_min_tokens >= 1,
            f"prefill_min_tokens is {self.prefill_min_tokens}, allowed: 1 or more",
        )
        require(
            0 < self.prefill_timeout <= 1e6,
            f"prefill_timeout is {self.prefill_timeout}, allowed: above 0 up to 1e6, in seconds",
        )

    @property
    def num_pools(self) -> int:
        """KV pools of one size: a second engine in this process has as many pages."""
        return 2 if "memory" in (self.prefill_from or ()) else 1
