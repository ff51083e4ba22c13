"""Stores in registries, through Debian's docker-registry over TLS: copies, pins, cache, faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.artifact import Artifact
from freezer.store import Store, copy_version, newest_versions, versions_of
from tests.support.keys import make_pair


@pytest.fixture
def folder(tmp_path: Path, one: Artifact, two: Artifact) -> Store:
    """A store in a folder with two versions of `tiny`, the second signed."""
    store = Store.open(str(tmp_path / "store"), create=True)
    store.publish("tiny", source_key="key", artifacts=[one])
    store.publish("tiny", source_key="other", artifacts=[one, two])
    private, _ = make_pair(tmp_path, "own")
    for name in ("portable", "cpu-x86-64-v4"):
        store.sign(store.version("tiny"), name, private)
    return store


def test_copies_are_equal_byte_for_byte(folder: Store, registry: str, tmp_path: Path) -> None:
    there = Store.open(registry)
    for number in (1, 2):
        copy_version(folder, there, f"tiny:{number}")
    assert there.models() == ["tiny"]
    assert there.versions("tiny") == [1, 2]
    assert there.version("tiny") == folder.version("tiny")
    assert versions_of(there, "tiny") == versions_of(folder, "tiny")
    assert newest_versions(there) == newest_versions(folder)
    back = Store.open(str(tmp_path / "back"), create=True)
    for number in (1, 2):
        copy_version(there, back, f"tiny:{number}")
    assert dict(back.layout("tiny").tags()) == dict(folder.layout("tiny").tags())
    for blob in (folder.root / "tiny" / "blobs" / "sha256").iterdir():
        assert (back.root / "tiny" / "blobs" / "sha256" / blob.name).read_bytes() == (
            blob.read_bytes()
        )
