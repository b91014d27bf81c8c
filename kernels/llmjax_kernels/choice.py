"""What the user says about which kernels serve."""

from __future__ import annotations

import os


def wanted() -> str:
    """`LLMJAX_KERNELS`: "xla" forbids all others, "triton" Mosaic GPU's, "mosaic" has these serve
    prompts too, "native" insists on the CPU's; else empty.

    Raises:
        RuntimeError: it is none of these.
    """
    value = os.environ.get("LLMJAX_KERNELS", "")
    if value not in ("", "xla", "triton", "mosaic", "native"):
        raise RuntimeError(f"LLMJAX_KERNELS is {value!r}, allowed: xla, triton, mosaic, native")
    return value
