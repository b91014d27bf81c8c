"""Which processes run an engine together. No jax."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .config import EngineConfig, check_types
from .errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes that serve one model.

    Attributes:
        coordinator_address: HOST:PORT where process 0 waits for the others, the same for all;
            or "auto", where JAX finds it and the next two by itself: SLURM, Open MPI. Without
            it this process serves alone.
        num_processes: how many there are, on all hosts together. Each brings all GPUs that it
            sees; under SLURM and Open MPI one, by its rank on the host.
        process_id: which of them this is, from 0. Process 0 schedules and serves HTTP; the
            others compute what it says.
        process_timeout: seconds without a sign of life after which a process counts as lost,
            and all of them end.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    process_timeout: float = 30.0

    def __post_init__(self) -> None:
        check_types(self)
        address, count, index = self.coordinator_address, self.num_processes, self.process_id
        given = {"num_processes": count, "process_id": index}
        if address in (None, AUTO):
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(
                        f"{name} is {value}, allowed: none, as coordinator_address is {address!r} "
                        "and not HOST:PORT"
                    )
        else:
            self._check_address(address)
            for name, value in given.items():
                if value is None:
                    raise ConfigError(f"{name} is needed, as coordinator_address is {address}")
            assert count is not None and index is not None
            if not 1 <= count <= 4096:
                raise ConfigError(f"num_processes is {count}, allowed: 1 to 4096")
            if not 0 <= index < count:
                raise ConfigError(f"process_id is {index}, allowed: 0 to {count - 1}")
        if not 1 <= self.process_timeout <= 1e6:
            raise ConfigError(
                f"process_timeout is {self.process_timeout}, allowed: 1 up to 1e6, in seconds"
            )

    @staticmethod
    def _check_address(address: str | None) -> None:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"coordinator_address is {address!r}, allowed: HOST:PORT or auto")


def check_together(config: EngineConfig) -> None:
    """Refuses what one process of several cannot do.

    Raises:
        ConfigError: names the option.
    """
    if config.prefill.prefill_from:
        raise ConfigError(
            f"prefill_from is {config.prefill.prefill_from}, allowed with coordinator_address: "
            "none, as a worker hands over whole pages and a process has only its heads of them"
        )
    if (steps := config.scheduler.num_scheduler_steps) > 1:
        raise ConfigError(
            f"num_scheduler_steps is {steps}, allowed with coordinator_address: 1, as process 0 "
            "tells the others of each step"
        )


def shared_options(config: EngineConfig) -> dict[str, Any]:
    """What all processes must have been told alike, by name."""
    options = asdict(config)
    del options["trace"]  # a file of process 0
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in flat.items()}
