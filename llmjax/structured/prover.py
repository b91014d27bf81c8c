"""Grammars are compiled elsewhere first, where nobody is hurt if that takes for ever or crashes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .limits import refuse

FUEL = 2_000_000
"""llguidance's own measure of how much work a grammar's lexer may be."""
SECONDS = 1.0
TOO_MUCH = "it is nested too deeply, or compiling it takes more than {:g} s or 64 MiB"


class Prover:
    """A process that compiles grammars (`prove.py`), started when it is first needed. Any thread
    may use it; it proves one at a time.

    Args:
        vocab_size, special, eos: of the vocabulary, whose special tokens grammars may name; those
            have their texts by their ids.
        seconds: of the processor, that compiling one may take.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        special: Mapping[int, str] | None = None,
        eos: Iterable[int] = (256,),
        seconds: float = SECONDS,
    ):
        about = {"fuel": FUEL, "size": vocab_size, "special": special or {}, "eos": [*eos]}
        about["seconds"] = self._seconds = seconds
        self._about = json.dumps(about)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._has_answered = False
        self._finish: weakref.finalize | None = None

    def check(self, source: str, label: str) -> None:
        """Raises InvalidRequestError, which names `label`, where it cannot be compiled."""
        self._prove("llguidance", source, label)

    def lark(self, gbnf: str, label: str) -> str:
        """A grammar of GBNF or EBNF in Lark's syntax. Raises InvalidRequestError, as `check`."""
        return self._prove("gbnf", gbnf, label)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _prove(self, kind: str, text: str, label: str) -> str:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # somebody else has ended it
            told, code = self._ask([kind, text])
            if code == -signal.SIGABRT and self._has_answered:
                # For want of memory, of which others before it may have left less.
                told, code = self._ask([kind, text])
        if code > 0 or (told is None and code == 0):
            raise RuntimeError("the process that compiles grammars does not run")
        if told is None:
            raise refuse(label, TOO_MUCH.format(self._seconds))
        problem, source = told
        if problem:
            raise refuse(label, problem)
        return source

    def _ask(self, question: list[str]) -> tuple[list[str] | None, int]:
        """The answer; None, and how the process has ended, where it has died of the question."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line:
            self._has_answered = True
            return json.loads(line), 0
        code = process.wait()
        self._end()
        return None, code

    def _start(self) -> subprocess.Popen[str]:
        self._has_answered = False
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("prove.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._finish = weakref.finalize(self, _kill, process)
        assert process.stdin is not None
        process.stdin.write(self._about + "\n")
        return process

    def _end(self) -> None:
        self._process = None
        if self._finish is not None:
            self._finish()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()  # closes the pipes too
