"""The notebooks run from top to bottom and show pictures."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from llmjax.checkpoint import pull
from llmjax.errors import DownloadError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("name", "pictures"), [("01_quickstart", 1), ("02_inside_the_model", 5)])
def test_notebook_runs_and_shows_pictures(name, pictures, monkeypatch):
    try:
        pull("smollm2-135m-instruct")
    except DownloadError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    paths = [ROOT, ROOT / "kernels", ROOT / "serving"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert shown(notebook) == pictures, "commit notebooks with their outputs"
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert shown(notebook) == pictures


def shown(notebook) -> int:
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    images = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return sum(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
