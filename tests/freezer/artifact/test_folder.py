"""The artifact folder: written in one step, read by its manifest, verified file by file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freezer.artifact.folder import MANIFEST, Artifact, file_ref, write_artifact
from freezer.errors import IntegrityError, NotPublishedError
from freezer.files.paths import check_inside
from tests.steps import flip_a_byte, rewritten, write_plain_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return write_plain_artifact(tmp_path / "artifact")


def test_a_folder_is_read_by_its_manifest(artifact: Artifact) -> None:
    again = Artifact.read(artifact.folder)
    assert again == artifact
    again.verify()


@pytest.mark.parametrize("name", ["payloads/all.pt2", "golden/inputs.safetensors"])
def test_every_file_is_verified(artifact: Artifact, name: str) -> None:
    path = artifact.folder / name
    flip_a_byte(path)
    with pytest.raises(IntegrityError, match=f"{name} is sha256:.*, expected sha256:.*; it was changed or damaged"):
        artifact.verify()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=rf"{name} has \d+ bytes, expected \d+"):
        artifact.verify()
    path.unlink()
    with pytest.raises(IntegrityError, match=f"{name} is missing; pull the artifact again"):
        artifact.verify()


def test_only_the_named_files_are_verified_when_some_are_named(artifact: Artifact) -> None:
    flip_a_byte(artifact.folder / "golden/inputs.safetensors")
    artifact.verify(artifact.manifest.payloads)
    with pytest.raises(IntegrityError):
        artifact.verify(artifact.manifest.files)


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "payloads/../../outside", "", "a\\..\\b"])
def test_a_path_that_leaves_the_folder_is_refused(artifact: Artifact, path: str) -> None:
    with pytest.raises(IntegrityError, match="outside the artifact's folder"):
        check_inside(path, origin="here")
    rewritten(artifact, payloads=(replace(artifact.manifest.payloads[0], path=path),))
    with pytest.raises(IntegrityError, match="outside the artifact's folder"):
        Artifact.read(artifact.folder)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(NotPublishedError, match=f"holds no {MANIFEST}; expected a folder that freeze or pull wrote"):
        Artifact.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotPublishedError):
        Artifact.read(tmp_path / "file")


def test_a_file_is_found_by_its_path(artifact: Artifact) -> None:
    assert artifact.file("golden/inputs.safetensors").media_type == "application/vnd.safetensors"
    with pytest.raises(IntegrityError, match="names no golden/none"):
        artifact.file("golden/none")


def test_writing_moves_the_whole_folder(artifact: Artifact, tmp_path: Path) -> None:
    staging, dest = artifact.folder, tmp_path / "dest"
    dest.mkdir()
    written = write_artifact(artifact.manifest, staging, dest)
    assert not staging.exists()
    Artifact.read(written.folder).verify()
    assert Artifact.read(dest).manifest == artifact.manifest


def test_writing_never_takes_a_folder_that_holds_something(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "mine").touch()
    with pytest.raises(FileExistsError, match="is not empty; name a new folder"):
        write_artifact(artifact.manifest, artifact.folder, tmp_path / "dest")
    assert [path.name for path in (tmp_path / "dest").iterdir()] == ["mine"]


def test_a_file_is_recorded_as_it_is(artifact: Artifact) -> None:
    found = file_ref(artifact.folder, "payloads/all.pt2", "type")
    assert (found.digest, found.size_bytes) == (artifact.manifest.payloads[0].digest, 7)
