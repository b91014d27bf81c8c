"""Run by a test: prints how far loading a model raised the peak of resident memory.

What jax takes does not count. Arguments: a small model that is loaded first where what any
model takes shall not count either (optional); the model; a dtype or a quantization; what native
kernels take as the size of a page, or 0 for plain arrays.
"""

import json
import sys
from pathlib import Path

import jax


def peak() -> int:
    """Bytes. getrusage would count the parent's memory, which a fork passes on."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


*small, big, kind, pages = sys.argv[1:]
name = "quantization" if kind.startswith("int") else "dtype"
options = {name: kind, "page_size": int(pages) or None, "progress": False}
jax.block_until_ready(jax.numpy.zeros(1))
before = peak()
from llmjax.checkpoint import load_model  # noqa: E402

for path in small:
    load_model(path, **options)
    before = peak()
model = load_model(big, **options)
assert model.native == (pages != "0")
weights = model.weight_bytes
print(json.dumps({"weights": weights, "rise": peak() - before}))
