"""Artifacts without models, for stores that never open them."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.artifact import Artifact
from freezer.store import Store
from tests.support.steps import write_plain_artifact


@pytest.fixture(params=["folder", "bucket", "registry"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    is_local = request.param == "folder"
    place = str(tmp_path / "store") if is_local else request.getfixturevalue(request.param)
    return Store.open(place, create=True)


@pytest.fixture
def one(tmp_path: Path) -> Artifact:
    """Of the class `portable`."""
    return write_plain_artifact(tmp_path / "one", b"one" * 1000)


@pytest.fixture
def two(tmp_path: Path) -> Artifact:
    """Of the class `cpu-x86-64-v4`."""
    return write_plain_artifact(tmp_path / "two", b"two" * 1000, device_class="cpu-x86-64-v4")
