"""Artifact folders: reading, verifying and writing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact import Artifact, check_inside, write_artifact
from freezer.errors import IntegrityError, NotPublishedError
from tests.support.steps import flip_a_byte, rewritten, write_plain_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return write_plain_artifact(tmp_path / "artifact")


@pytest.mark.parametrize("name", ["payloads/all.pt2", "golden/inputs.safetensors"])
def test_verify_reports_changed_and_missing_files(artifact: Artifact, name: str) -> None:
    path = artifact.folder / name
    flip_a_byte(path)
    with pytest.raises(IntegrityError):
        artifact.verify()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        artifact.verify()
    path.unlink()
    with pytest.raises(IntegrityError):
        artifact.verify()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../outside", "payloads/../../outside", "", "a\\..\\b"]
)
def test_paths_outside_the_folder_are_rejected(artifact: Artifact, path: str) -> None:
    with pytest.raises(IntegrityError):
        check_inside(path, origin="here")
    rewritten(artifact, payloads=(replace(artifact.manifest.payloads[0], path=path),))
    with pytest.raises(IntegrityError):
        Artifact.read(artifact.folder)


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(NotPublishedError):
        Artifact.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotPublishedError):
        Artifact.read(tmp_path / "file")


def test_write_keeps_foreign_folders(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "mine").touch()
    with pytest.raises(OSError, match="not empty"):
        write_artifact(artifact.manifest, artifact.folder, tmp_path / "dest")
    assert [path.name for path in (tmp_path / "dest").iterdir()] == ["mine"]
