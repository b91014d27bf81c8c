"""The native kernels' tests need the library; the threads that one test set end with it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from llmjax_kernels import native, packed

if sanitized := os.environ.get("LLMJAX_SANITIZED"):
    # A library built with sanitizers (`make sanitize`), and weights where they see reads behind.
    native._LIBRARY = Path(sanitized)
    packed.empty = np.empty


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not native.available():
        skip = pytest.mark.skip(reason="the native kernels are not built, or forbidden")
        for item in items:
            if item.path.parent.name == "kernels":
                item.add_marker(skip)


@pytest.fixture
def set_threads():
    yield native.set_threads
    native.set_threads(0)
