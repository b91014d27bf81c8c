"""The hub: a small server on this machine stands in for it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from llmjax.catalogue import CatalogueEntry, HubFile
from llmjax.checkpoint import CATALOGUE, pull, resolve_model
from llmjax.checkpoint.resolve import find_model
from llmjax.errors import DownloadError, ModelNotFoundError

COMMIT = "a" * 40
REPOSITORIES = {
    "org/folder": {
        "config.json": b"{}",
        "model-00001-of-00001.safetensors": b"weights",
        "model.safetensors.index.json": b"{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"",
        "consolidated.safetensors": b"the same again",
        "pytorch_model.bin": b"the same again",
        "onnx/config.json": b"{}",
        "README.md": b"",
    },
    "org/quants": {
        "a.Q4_0.gguf": b"GGUF a",
        "b-00001-of-00002.gguf": b"GGUF b1",
        "b-00002-of-00002.gguf": b"GGUF b2",
        "config.json": b"{}",
    },
    "org/gated": {},
}


class Hub(BaseHTTPRequestHandler):
    """The few answers that downloading a snapshot needs."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[4])
        elif parts[2:3] == ["resolve"]:
            self.answer(REPOSITORIES["/".join(parts[:2])]["/".join(parts[4:])])
        else:
            self.refuse(404, "RepoNotFound")

    def describe(self, repo: str, what: str) -> None:
        if repo not in REPOSITORIES:
            return self.refuse(404, "RepoNotFound")
        if repo == "org/gated":
            return self.refuse(403, "GatedRepo")
        files = REPOSITORIES[repo]
        tree = [
            {"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()
        ]
        siblings = [{"rfilename": name} for name in files]
        info = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return self.answer(json.dumps(tree if what == "tree" else info).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Says nothing."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("LLMJAX_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("hub")
def test_a_repository_comes_without_second_copies():
    folder = resolve_model("org/folder", progress=False)
    assert sorted(f.name for f in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


@pytest.mark.usefixtures("hub")
def test_a_named_file_comes_alone_and_a_split_one_whole():
    assert resolve_model("org/quants:a.Q4_0.gguf", progress=False).read_bytes() == b"GGUF a"
    second = resolve_model("org/quants:b-00002-of-00002.gguf", progress=False)
    assert second.read_bytes() == b"GGUF b2"
    assert sorted(f.name for f in second.parent.iterdir()) == [
        "a.Q4_0.gguf",
        "b-00001-of-00002.gguf",
        "b-00002-of-00002.gguf",
    ]


@pytest.mark.usefixtures("hub")
def test_the_files_of_a_repository_are_offered():
    with pytest.raises(ModelNotFoundError, match=r"no safetensors.*org/quants:FILE: a.Q4_0.gguf"):
        resolve_model("org/quants", progress=False)
    with pytest.raises(ModelNotFoundError, match=r"no file 'c.gguf'.*a.Q4_0.gguf, b-00001"):
        resolve_model("org/quants:c.gguf", progress=False)


@pytest.mark.usefixtures("hub")
def test_refusals_are_told_apart():
    with pytest.raises(ModelNotFoundError, match=r"no repository 'org/absent'.*HF_TOKEN"):
        resolve_model("org/absent", progress=False)
    with pytest.raises(DownloadError, match=r"org/gated is gated: accept its licence"):
        resolve_model("org/gated", progress=False)


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub():
    reason = r"the hub cannot be reached for 'org/folder' \(.*refused"
    with pytest.raises(DownloadError, match=f"no local path is called 'org/folder', and {reason}"):
        resolve_model("org/folder", progress=False)


def test_what_is_cached_is_used_without_a_network(hub, monkeypatch):
    folder = resolve_model("org/folder", progress=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/folder", progress=False) == folder


@pytest.mark.usefixtures("hub")
def test_what_is_cached_is_found_and_nothing_is_fetched_for_it():
    for name in ("org/folder", "org/quants:a.Q4_0.gguf"):
        with pytest.raises(ModelNotFoundError, match=f"{name} is not on this machine"):
            find_model(name)
        path = resolve_model(name, progress=False)
        assert find_model(name) == path


@pytest.mark.usefixtures("no_hub")
def test_offline_mode_is_respected(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set and 'org/folder' is not"):
        resolve_model("org/folder", progress=False)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_catalogue_model_from_the_hub_is_checked(hub, monkeypatch, is_right):
    data = REPOSITORIES["org/quants"]["a.Q4_0.gguf"]
    entry = CatalogueEntry(
        name="tiny",
        description="for tests",
        file="tiny.gguf",
        size=len(data),
        sha256=hashlib.sha256(data if is_right else b"").hexdigest(),
        wheels=(),
        hub=HubFile("org/quants", "a.Q4_0.gguf", COMMIT),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    monkeypatch.setattr("llmjax.checkpoint.resolve.fetch_from_wheels", lambda *a, **k: _no_wheels())
    if is_right:
        path = pull("tiny", progress=False)
        assert path.read_bytes() == data
        assert sorted(f.name for f in path.parent.iterdir()) == [".lock", "tiny.gguf"]
    else:
        with pytest.raises(DownloadError, match=r"(?s)no wheels.*tiny came damaged"):
            pull("tiny", progress=False)


def _no_wheels():
    raise DownloadError("no wheels here")
