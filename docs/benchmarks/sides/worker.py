"""What every side has in common: it loads, says so, and then measures what it is told to.

A request and its answer are a line of JSON each: {"decode": streams, "steps": n} or
{"prefill": tokens}, and the seconds of one step or of the prompt. Runs in any Python.
"""

import json
import os
import random
import sys

PROMPT_LEN = 16
HEAD_START = 2


def random_ids(count, vocab_size):
    """Ordinary tokens: the first and the last ids are often special."""
    return [random.randrange(1000, min(40_000, vocab_size - 1000)) for _ in range(count)]


def claim_stdout():
    """The file to answer on; whatever else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def run(answers, about, decode_seconds, prefill_seconds):
    """Answers requests until stdin ends; `about` is said first."""
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "decode" in request:
            seconds = decode_seconds(request["decode"], request["steps"])
        else:
            seconds = prefill_seconds(request["prefill"])
        print(json.dumps(seconds), file=answers)
