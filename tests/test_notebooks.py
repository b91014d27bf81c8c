"""The notebooks run from top to bottom and show pictures."""

from __future__ import annotations

import base64
import os
from itertools import pairwise
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
    assert not scattered(notebook), "execute notebooks with coalesce_streams before committing"
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", coalesce_streams=True)
    client.execute()
    assert shown(notebook) == pictures
    assert not scattered(notebook)


def scattered(notebook) -> list[str]:
    """Cells whose text, printed piece by piece, is stored as so many outputs."""
    return [
        cell.source
        for cell in notebook.cells
        for one, two in pairwise(cell.get("outputs", []))
        if one.output_type == two.output_type == "stream" and one.name == two.name
    ]


def shown(notebook) -> int:
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    images = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return sum(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
