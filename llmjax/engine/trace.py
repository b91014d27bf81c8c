"""A timeline of the engine for Perfetto (ui.perfetto.dev) or chrome://tracing.

The file is an array of trace events ("Trace Event Format", Chrome). It is a whole JSON document
after every write, whatever ends the process; what the last half second added may be missing
where it was killed.
"""

from __future__ import annotations

import atexit
import json
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from ..cache.page_store import Bring, Condense, Copy, Decision, Load, Save
from ..checks import shown
from ..errors import ConfigError
from .buckets import Bucket
from .plan import Plan

TRACKS = ("schedule", "dispatch", "collect sampled tokens", "detokenise", "compile", "pages")
_DEVICE = len(TRACKS)
"""Tracks of steps on the device come behind the others, as many as are in flight at once."""
_END = b"\n]\n"
_FLUSH_SECONDS = 0.5
_FLUSH_EVENTS = 512
_KINDS = {
    Copy: "copies",
    Save: "saves",
    Load: "loads",
    Bring: "brought",
    Condense: "evictions",
}


class NoTrace:
    """What an engine tells its trace, where there is none: nothing happens.

    Times are those of `time.perf_counter`.

    Attributes:
        on_decision: for `PageStore.on_decision`.
    """

    on_decision: Callable[[Decision], None] | None = None

    def dispatched(self, plan: Plan, began: float, scheduled: float, num_preemptions: int) -> None:
        """A step was planned from `began` to `scheduled`, and dispatched from then to now.

        Args:
            num_preemptions: so far, since the engine's start.
        """

    def collected(self, plan: Plan, began: float) -> None:
        """The oldest step's tokens have come; the host waited for them since `began`."""

    def detokenised(self, began: float, tokens: int) -> None:
        """A step's tokens became text, from `began` to now."""

    def compiled(self, bucket: Bucket, began: float) -> None:
        """A step program was compiled, from `began` to now."""

    def beside(self, process: str) -> NoTrace:
        """Another engine's, in the same file."""
        return self

    def flush(self) -> None:
        """Writes what has been told."""

    def close(self) -> None:
        """The same, for the last time."""


class TraceFile:
    """Trace events in a file, which replaces what was there. Any thread may add some.

    Attributes:
        origin: time 0 (`time.perf_counter`).

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str):
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"trace is {shown(path)}, allowed: a file that can be written ({error})"
            ) from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise ConfigError(f"trace is {shown(path)}, allowed: a regular file")
        self._lock = threading.Lock()
        self.origin = self._flushed = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._size = os.pwrite(self._file, b"[" + _END, 0) - len(_END)
        # A program that Ctrl-C ends does not close its engine.
        atexit.register(self.close)

    def add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)
            late = time.perf_counter() - self._flushed > _FLUSH_SECONDS
            if late or len(self._events) >= _FLUSH_EVENTS:
                self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._lock:
            self._flush()
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        events, self._events = self._events, []
        if self._file is None or not events:
            return
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        begin = ",\n" if self._size > 1 else "\n"
        data = (begin + lines).encode()
        # One write, over the end of the array: the file is whole before it and after.
        os.pwrite(self._file, data + _END, self._size)
        self._size += len(data)


class Trace(NoTrace):
    """One engine's events, drawn as a process of its own. Any thread may tell it.

    Args:
        processes: numbers those of the file.
    """

    def __init__(self, file: TraceFile, process: str, processes: Iterator[int] | None = None):
        self._file = file
        self._processes = processes or count(1)
        self._process = next(self._processes)
        self._steps = count(1)
        # Steps on the device: number, track, start.
        self._on_device: dict[Plan, tuple[int, int, float]] = {}
        self._num_tracks = self._num_preemptions = 0
        self._add({"ph": "M", "name": "process_name", "tid": 0, "args": {"name": process}})
        for name in TRACKS:
            self._add_track(name)
        self.flush()

    def beside(self, process: str) -> NoTrace:
        return Trace(self._file, process, self._processes)

    def dispatched(self, plan: Plan, began: float, scheduled: float, num_preemptions: int) -> None:
        now, step = time.perf_counter(), next(self._steps)
        tracks = {track for _, track, _ in self._on_device.values()}
        track = next(i for i in count(_DEVICE) if i not in tracks)
        if track == self._num_tracks:
            self._add_track(f"device {track - _DEVICE}")
        self._on_device[plan] = step, track, now
        told = {"step": step, **_describe(plan)}
        # Some may stem from calls that could not plan a step.
        preemptions = num_preemptions - self._num_preemptions
        self._num_preemptions = num_preemptions
        args = {**told, "preemptions": preemptions}
        self._span("schedule", "schedule", began, scheduled, args)
        self._span("dispatch", "dispatch", scheduled, now, told)

    def collected(self, plan: Plan, began: float) -> None:
        now = time.perf_counter()
        step, track, dispatched = self._on_device.pop(plan)
        told = {"step": step, **_describe(plan)}
        kind = "decode" if plan.bucket.decode_only else "mixed"
        self._span(track, f"{kind} T={plan.bucket.tokens}", dispatched, now, told)
        self._span("collect sampled tokens", "collect", began, now, {"step": step})

    def detokenised(self, began: float, tokens: int) -> None:
        self._span("detokenise", "detokenise", began, time.perf_counter(), {"tokens": tokens})

    def compiled(self, bucket: Bucket, began: float) -> None:
        self._span("compile", _name(bucket), began, time.perf_counter(), {"bucket": _name(bucket)})

    def on_decision(self, decision: Decision) -> None:
        told = decision._asdict()
        event = {"ph": "i", "s": "t", "name": told.pop("choice"), "args": told}
        self._add({**event, "tid": TRACKS.index("pages"), "ts": self._ts(time.perf_counter())})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add_track(self, name: str) -> None:
        tid, self._num_tracks = self._num_tracks, self._num_tracks + 1
        self._add({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
        # A step's way from left to right is one from top to bottom.
        order = {"sort_index": 2 * tid if tid < _DEVICE else 3}
        self._add({"ph": "M", "name": "thread_sort_index", "tid": tid, "args": order})

    def _span(
        self, track: str | int, name: str, began: float, ended: float, args: dict[str, Any]
    ) -> None:
        tid = TRACKS.index(track) if isinstance(track, str) else track
        ts = self._ts(began)
        duration = round(max(0.0, self._ts(ended) - ts), 3)
        self._add({"ph": "X", "name": name, "tid": tid, "ts": ts, "dur": duration, "args": args})

    def _ts(self, seconds: float) -> float:
        return round((seconds - self._file.origin) * 1e6, 3)

    def _add(self, event: dict[str, Any]) -> None:
        self._file.add({"pid": self._process, **event})


def make_trace(path: str | None, process: str) -> NoTrace:
    """A trace into the file at `path`, or none."""
    return Trace(TraceFile(path), process) if path is not None else NoTrace()


def _name(bucket: Bucket) -> str:
    return f"T={bucket.tokens} S={bucket.seqs} P={bucket.pages}"


def _describe(plan: Plan) -> dict[str, Any]:
    moved = Counter(_KINDS[type(transfer)] for transfer in plan.transfers)
    return {
        "bucket": _name(plan.bucket),
        "steps": plan.num_steps,
        "tokens": plan.num_tokens,
        "padding": plan.bucket.tokens - plan.num_tokens,
        "decodes": plan.num_decodes,
        "prompts": len(plan.chunks) - plan.num_decodes,
        "prompt_tokens": plan.num_tokens - plan.num_decodes,
        "admitted": len(plan.admitted),
        **{kind: moved[kind] for kind in _KINDS.values()},
    }
