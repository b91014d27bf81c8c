"""Run by a test: prints how far loading a model raised the peak of resident memory."""

import json
import resource
import sys

import jax

from llmjax.checkpoint import load_model


def peak() -> int:
    """Bytes; Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


small, big, dtype = sys.argv[1:]
load_model(small, dtype=dtype, progress=False)
before = peak()
model = load_model(big, dtype=dtype, progress=False)
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state))
print(json.dumps({"weights": weights, "rise": peak() - before}))
