"""The native kernels' tests need the library; the threads that one test set end with it."""

from __future__ import annotations

import pytest

from llmjax_kernels import native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not native.available():
        skip = pytest.mark.skip(reason="the native kernels are not built, or forbidden")
        for item in items:
            if item.path.parent.name == "kernels" and "build" not in item.path.name:
                item.add_marker(skip)


@pytest.fixture
def set_threads():
    yield native.set_threads
    native.set_threads(0)
