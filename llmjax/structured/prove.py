"""Compiles grammars that nobody knows yet: a program of its own, which `Prover` runs.

A grammar may be so deep that compiling it overflows the stack, or so large that it takes for ever.
Neither can be caught where it happens: it is this process that dies of it. It imports nothing of
llmjax, so that it starts in no time.

Lines of JSON come in: what there is to know of the vocabulary, then (kind, grammar) in each; for
each a line goes out: (what is wrong with it, "" where nothing; the grammar as llguidance reads it).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

STACK_BYTES = 1 << 20
"""Half of the smallest stack on which a grammar is followed, that of a thread of Rust's."""
MEMORY_BYTES = 64 << 20
"""For one grammar, beside what the program has to begin with."""


class Vocabulary:
    """A token for each byte, and the special tokens, which grammars may name."""

    bos_token_id = None

    def __init__(self, size: int, special: dict[str, str], eos: list[int]):
        self.special_token_ids = sorted(map(int, special))
        self.eos_token_id = eos[0]
        self.tokens = [special.get(str(i), "").encode() for i in range(size)]
        plain = (i for i in range(size) if str(i) not in special)
        self._ids = dict(zip(range(256), plain, strict=False))
        for byte, i in self._ids.items():
            self.tokens[i] = bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text if byte in self._ids]


def compiled(tokenizer: LLTokenizer, limits: LLParserLimits, kind: str, text: str) -> str:
    """The grammar as llguidance reads it. Raises ValueError where it is none."""
    source = text
    if kind == "gbnf":
        try:
            source = grammar_from("gbnf", text)
        except ValueError as error:
            raise ValueError(f"it is no GBNF or EBNF: {error}") from error
    matcher = LLMatcher(tokenizer, source, limits=limits, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error().strip())
    first = matcher.deep_copy()
    first.compute_ff_tokens()
    first.compute_bitmask()
    return source


def answer(about: dict[str, Any]) -> None:
    limits = LLParserLimits(initial_lexer_fuel=about["fuel"], verbose_errors=False)
    vocabulary = Vocabulary(about["size"], about["special"], about["eos"])
    wrapped = TokenizerWrapper(vocabulary)
    tokenizer = LLTokenizer(wrapped, n_vocab=about["size"], eos_token=about["eos"])
    bound_memory()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, about["seconds"])
        kind, text = json.loads(line)
        try:
            told = ["", compiled(tokenizer, limits, kind, text)]
        except MemoryError:
            signal.raise_signal(signal.SIGABRT)
        except BaseException as error:  # a panic of Rust's is no Exception
            told = [str(error) or type(error).__name__, ""]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(told), flush=True)


def bound_memory() -> None:
    """To what is taken by now, and what one grammar may take."""
    if sys.platform != "linux":
        return  # who else has no /proc bounds no addresses
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = has + MEMORY_BYTES
    soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_AS, (soft, most))


def main() -> None:
    # Who started it ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer, args=(json.loads(sys.stdin.readline()),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
