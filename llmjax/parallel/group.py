"""Processes that run an engine together, through `jax.distributed`.

Process 0 leads: it sends messages, and the others carry them out in the same order. They travel
through the key-value store of JAX's coordination service, which every process is connected to
already. A collective on the devices would wait for the step that runs there; the store takes half
a millisecond, beside it, and needs no port, no protocol and no shapes of its own.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax

from ..distributed import AUTO, DistributedConfig
from ..errors import ConfigError, GroupError

log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_JOIN_SECONDS = 300
_LOAD_SECONDS = 3600
"""Within which all processes get to the same place of a start."""


@dataclass
class _Pulse:
    """What the leader knows of another process: its last sign of life, and when that came."""

    said: str
    since: float


class Group:
    """This process among the others.

    Attributes:
        index: which it is; 0 leads.
        size: how many there are.
    """

    def __init__(self, client: Any, index: int, size: int, timeout: float):
        self.index, self.size = index, size
        self._client, self._timeout = client, timeout
        self._sent = self._received = self._deleted = self._gathered = 0
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._left = threading.Event()
        self._lost = ""
        self._on_lost: Callable[[str], None] = log.error
        self._sender = threading.Thread(target=self._send_all, name="llmjax-sender", daemon=True)
        self._pulse = threading.Thread(target=self._beat, name="llmjax-pulse", daemon=True)
        if self.leads:
            self._sender.start()
        self._pulse.start()

    @classmethod
    def join(cls, config: DistributedConfig) -> Group:
        """Waits until all have come; to be called before anything else asks JAX for devices.

        Raises:
            ConfigError: nothing is found where the configuration says.
        """
        # It would take SIGTERM from the server, which has its own way to end.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        auto = config.coordinator_address == AUTO
        try:
            jax.distributed.initialize(
                None if auto else config.coordinator_address,
                config.num_processes,
                config.process_id,
                initialization_timeout=_JOIN_SECONDS,
                # Who is lost is told apart here first; JAX would end this process by a signal.
                heartbeat_timeout_seconds=int(2 * config.process_timeout) + 60,
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"coordinator_address is {config.coordinator_address!r}, where the processes did "
                f"not find each other: {error}"
            ) from error
        # JAX has no public way to its store but through programs on the devices.
        from jax._src.distributed import global_state

        log.info("process %d of %d", global_state.process_id, global_state.num_processes)
        return cls(
            global_state.client,
            global_state.process_id,
            global_state.num_processes,
            config.process_timeout,
        )

    @property
    def leads(self) -> bool:
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """What every process says, in their order; all call this in the same order too."""
        name, self._gathered = f"gathered/{self._gathered}", self._gathered + 1
        self._client.key_value_set(f"llmjax/{name}/{self.index}", json.dumps(value))
        return [json.loads(self._await(f"{name}/{i}")) for i in range(self.size)]

    def _await(self, key: str) -> Any:
        """What is soon to come, unless a process is lost meanwhile."""
        deadline = time.monotonic() + _LOAD_SECONDS
        while True:
            try:
                return self._get(key, 1)
            except TimeoutError as error:
                if self._lost or time.monotonic() > deadline:
                    raise GroupError(self._lost or str(error)) from error

    def least(self, value: int) -> int:
        """Of what all processes say."""
        return min(self.gather(value))

    def require_same(self, what: dict[str, Any]) -> None:
        """Raises ConfigError in all processes where they differ in something; names it."""
        values = self.gather(what)
        for index, other in enumerate(values):
            for name, value in other.items():
                if value != values[0].get(name):
                    raise ConfigError(
                        f"{name} is {value!r} in process {index} and {values[0].get(name)!r} in "
                        "process 0, allowed: the same in all"
                    )

    def tell(self, name: str) -> None:
        """Says that this process has come to a place; see `await_all`."""
        self._client.key_value_set(f"llmjax/{name}/{self.index}", "")

    def await_all(self, name: str, stop: threading.Event) -> None:
        """Waits until all have told the same, or `stop` is set."""
        for index in range(self.size):
            while not stop.is_set():
                with suppress(TimeoutError):
                    self._get(f"{name}/{index}", 1)
                    break

    # Messages.

    def send(self, message: bytes) -> None:
        """To all others; returns at once.

        Raises:
            GroupError: one of them is lost.
        """
        if self._lost:
            raise GroupError(self._lost)
        self._outbox.put(message)

    def receive(self) -> bytes:
        """The leader's next message.

        Raises:
            TimeoutError: nothing has come for a second.
            GroupError: the leader is gone.
        """
        data = self._get(f"message/{self._received}", 1, self._client.blocking_key_value_get_bytes)
        self._received += 1
        return data

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._client.key_value_set_bytes(f"llmjax/message/{self._sent}", message)
            except Exception as error:
                self._lose(f"nothing can be sent to the other processes: {error}")
                return
            self._sent += 1

    def _get(self, key: str, seconds: float, get: Any = None) -> Any:
        get = get or self._client.blocking_key_value_get
        try:
            return get(f"llmjax/{key}", int(1000 * seconds))
        except Exception as error:  # of a class that JAX does not export
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"{key} has not come within {seconds:g} s") from error
            raise GroupError(f"the coordinator of this group does not answer: {error}") from error

    # Who is alive.

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """In the leader: has another thread call `on_lost` when a process ends or falls silent."""
        self._on_lost = on_lost
        if self._lost:
            on_lost(self._lost)

    def fail(self, reason: str) -> None:
        """Tells the leader that this process ends, and why."""
        self._left.set()
        self._pulse.join()
        self._say(f"failed {reason}")

    def leave(self) -> None:
        """In the leader, after the last message: waits a moment until the others have ended."""
        if self._left.is_set():
            return
        self._outbox.put(None)
        self._sender.join(self._timeout)
        deadline = time.monotonic() + min(5.0, self._timeout)
        while not self._lost and time.monotonic() < deadline:
            if all(said == "ended" for said in self._pulses().values()):
                break
            time.sleep(0.05)
        self._left.set()

    def end(self) -> None:
        """In the others: says that this process has ended as it was told to."""
        self._left.set()
        self._pulse.join()
        self._say("ended")

    def _beat(self) -> None:
        beats, known = 0, dict[str, _Pulse]()
        while not self._left.wait(_BEAT_SECONDS):
            try:
                if self.leads:
                    self._check(known)
                else:
                    self._say(f"alive {self._received} {beats}")
            except Exception as error:
                self._lose(f"the coordinator of this group does not answer: {error}")
                return
            beats += 1

    def _say(self, text: str) -> None:
        self._client.key_value_set(f"llmjax/pulse/{self.index}", text, allow_overwrite=True)

    def _pulses(self) -> dict[str, str]:
        found = dict.fromkeys(map(str, range(1, self.size)), "")
        for key, said in self._client.key_value_dir_get("llmjax/pulse"):
            found[os.path.basename(key)] = said
        return found

    def _check(self, known: dict[str, _Pulse]) -> None:
        now, read = time.monotonic(), self._sent
        for index, said in self._pulses().items():
            pulse = known.setdefault(index, _Pulse(said, now))
            if pulse.said != said:
                known[index] = _Pulse(said, now)
            word, _, rest = said.partition(" ")
            if word == "failed":
                self._lose(f"process {index} of {self.size} has failed: {rest}")
            elif word != "ended" and now - pulse.since > self._timeout:
                self._lose(
                    f"process {index} of {self.size} has given no sign of life for "
                    f"{self._timeout:g} s"
                )
            read = min(read, int(rest.split()[0]) if word == "alive" else 0)
        # What all have read is of no more use.
        for number in range(self._deleted, read):
            self._client.key_value_delete(f"llmjax/message/{number}")
        self._deleted = max(self._deleted, read)

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost = reason
            self._on_lost(reason)
