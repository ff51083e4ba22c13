"""What torch says of itself is asked once for each torch that is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from freezer.freezing.target.target import toolchain
from freezer.freezing.target.toolchain import torch_versions
from pipeline.worker.probe import keep_versions, known_versions, probe
from tests.steps import python


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coldpress" / "torch"


def test_a_second_probe_asks_no_child_and_says_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe("portable", 2)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.delattr("pipeline.worker.tasks.run_isolated")
    again = probe("portable", 2)
    assert again == first
    assert repr(again.toolchain) == repr(first.toolchain) == repr(toolchain()), "nodes are compared by it"


@pytest.mark.parametrize(
    "module", ["pipeline.run", "pipeline.worker.tasks", "pipeline.tracking.process", "jobs.optimize", "jobs.status"]
)
def test_drivers_and_workers_import_no_torch(module: str) -> None:
    """It takes two seconds and 180 MB of each of them; children import it."""
    code = f"import sys, {module}; print(sorted({{'torch', 'mlflow', 'matplotlib'}} & set(sys.modules)))"
    assert python(code).splitlines()[-1] == "[]"


def test_another_build_of_torch_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libtorch.so"
    library.write_bytes(b"one")
    monkeypatch.setattr(probe, "FILES", (str(library),))
    keep_versions(torch_versions())
    assert known_versions() == torch_versions()
    os.utime(library, ns=(1, 1))
    assert known_versions() is None
    library.unlink()
    assert known_versions() is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"torch": "2.13.0"}', b"\xff"])
def test_a_damaged_file_is_asked_for_anew(cache: Path, content: bytes) -> None:
    keep_versions(torch_versions())
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert known_versions() is None
    keep_versions(torch_versions())
    assert known_versions() == torch_versions()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_versions(torch_versions())
    assert known_versions() is None
