"""Compiled step programs: made ahead of traffic, kept on disk, never made by it."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
from tqdm.auto import tqdm

from ..checkpoint import cache_dir
from ..errors import UnexpectedCompileError
from ..parallel.group import Group

log = logging.getLogger(__name__)

_HEAD_START = 3.0
"""Seconds that the first requests get to themselves before the rest is compiled beside them."""


def on_cpu() -> bool:
    """Whether steps take the processors that the host's work needs too."""
    return jax.default_backend() == "cpu"


def enable_persistent_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk between runs: in `directory`, or where JAX was told."""
    if directory or jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", directory or str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Order(Protocol):
    """The buckets to compile, in which order, and who wants to know that one is ready."""

    def compile_order(self) -> tuple[list[Any], list[Any]]: ...

    def mark_ready(self, bucket: Any, /) -> None: ...


class Programs:
    """The compiled program of each bucket.

    Args:
        compile_bucket: lowers and compiles one bucket's step.
        on_compiled: told of each bucket and when its compilation began (`time.perf_counter`),
            as soon as it has ended, by the thread that compiled it.
        group: the processes that all compile the same; a program is ready once all have it.
    """

    def __init__(
        self,
        buckets: Order,
        compile_bucket: Callable[[Any], Any],
        on_compiled: Callable[[Any, float], None],
        group: Group | None = None,
    ):
        self._group = group
        self._buckets = buckets
        self._compile_bucket = compile_bucket
        self._on_compiled = on_compiled
        self._programs: dict[Any, Any] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __getitem__(self, bucket: Any) -> Any:
        return self._programs[bucket]

    def start(self, *, background: bool) -> None:
        """Compiles the first buckets, then the rest, behind the caller if `background`."""
        first, rest = self._buckets.compile_order()
        awaited = first if background else [*first, *rest]
        # Where each program has a log line, a bar would only run through them.
        quiet = log.isEnabledFor(logging.INFO)
        for bucket in tqdm(awaited, "compiling step programs", unit="program", disable=quiet):
            self._compile(bucket)
        _return_free_memory()
        if not background:
            return
        self._thread = threading.Thread(
            target=self._compile_rest, args=(rest,), name="llmjax-compile"
        )
        self._thread.start()

    def close(self) -> None:
        """Stops compiling after the program at hand."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _compile_rest(self, rest: list[Any]) -> None:
        self._stop.wait(_HEAD_START)
        for bucket in rest:
            # A process whose main thread has ended must not wait for programs.
            if self._stop.is_set() or not threading.main_thread().is_alive():
                return
            try:
                self._compile(bucket)
            except Exception:
                log.exception("compiling %s failed; it stays unused", bucket)
        _return_free_memory()

    def _compile(self, bucket: Any) -> None:
        start = time.perf_counter()
        self._programs[bucket] = self._compile_bucket(bucket)
        self._on_compiled(bucket, start)
        if self._group is not None:
            self._share(self._group, f"compiled {tuple(bucket)}")
        self._buckets.mark_ready(bucket)
        log.info("compiled %s in %.1f s", bucket, time.perf_counter() - start)

    def _share(self, group: Group, name: str) -> None:
        group.tell(name)
        if group.leads:  # who else would use it?
            group.await_all(name, self._stop)


def _return_free_memory() -> None:
    """Gives the system back what the compiler has freed: hundreds of MiB that glibc keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class CompileGuard:
    """Counts what the current thread compiles; the engine's thread should compile nothing.

    Use as a context manager in tests: leaving it raises if anything was compiled.
    """

    _counts: ClassVar[dict[int, int]] = {}
    _listening: ClassVar[bool] = False

    def __init__(self) -> None:
        if not CompileGuard._listening:
            jax.monitoring.register_event_duration_secs_listener(_count_compilation)
            CompileGuard._listening = True
        self._at_start = self.count()

    @staticmethod
    def count() -> int:
        """Programs compiled by the current thread since the first guard was made."""
        return CompileGuard._counts.get(threading.get_ident(), 0)

    def __enter__(self) -> CompileGuard:
        self._at_start = self.count()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        compiled = self.count() - self._at_start
        if kind is None and compiled:
            raise UnexpectedCompileError(f"{compiled} program(s) were compiled on the hot path")


def _count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        thread = threading.get_ident()
        CompileGuard._counts[thread] = CompileGuard._counts.get(thread, 0) + 1
