"""How compiling grammars holds up other threads.

    python docs/benchmarks/grammars.py FILE.jsonl.xz...

One thread compiles the schemas of jsonschemabench (files of lines {"id", "schema"}), one after the
other. Another does nothing but read that thread's clock: by how much it has gone on between two
looks is how long the one ran while the other, as the engine's loop would, waited for Python. All is
processor time, which other programs have no part in. For docs/benchmarks/schemas.md.
"""

from __future__ import annotations

import argparse
import json
import lzma
import threading
import time
from pathlib import Path

from llmjax import SamplingParams, StructuredOutputs
from llmjax.checkpoint import open_checkpoint, resolve_model
from llmjax.errors import InvalidRequestError
from llmjax.structured import GrammarCompiler

NOTED = 1e-3
"""Seconds: shorter waits are those of any two threads that share an interpreter."""


def watched(grammars: GrammarCompiler, schema: object) -> tuple[float, list[float]]:
    """Processor seconds that compiling takes its thread, and those of each wait for that.

    Raises:
        InvalidRequestError: the schema is not supported.
    """
    params = SamplingParams(structured_outputs=StructuredOutputs(json=schema))
    (ident,) = (t.ident for t in threading.enumerate() if t.name.startswith("llmjax-grammar"))
    clock = time.pthread_getcpuclockid(ident)
    began = last = time.clock_gettime(clock)
    waits, done = [], grammars.compile(params)
    while not done.done():
        now = time.clock_gettime(clock)
        if now - last > NOTED:
            waits.append(now - last)
        last = now
    done.result()
    return time.clock_gettime(clock) - began, waits


def tell(name: str, grammars: GrammarCompiler, schemas: list) -> None:
    taken, waits = [], []
    for schema in schemas:
        try:
            seconds, waited = watched(grammars, schema)
        except InvalidRequestError:
            continue
        taken.append(seconds)
        waits += waited
    slow, slowest, longest = sorted(taken)[int(0.99 * len(taken))], max(taken), max([0, *waits])
    print(
        f"{name}: {len(taken)} in {sum(taken):.3f} s, 99 of 100 within {1e3 * slow:.1f} ms, the "
        f"slowest {1e3 * slowest:.1f}; waits {sum(waits):.3f} s, at most {1e3 * longest:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth schema [1]")
    args = parser.parse_args()
    tokenizer = open_checkpoint(resolve_model(args.model)).read_text_side().tokenizer
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, num_threads=1)
    grammars.compile(SamplingParams(bad_words=["a"])).result()  # its thread, and its imports
    tell("the vocabulary", grammars, [{"type": "null"}])
    for path in args.files:
        lines = lzma.decompress(path.read_bytes()).splitlines()[:: args.every]
        tell(path.name, grammars, [json.loads(line)["schema"] for line in lines])


if __name__ == "__main__":
    main()
