"""Artifacts without models, for stores that never open them."""

from __future__ import annotations

from pathlib import Path

import pytest

from freezer.artifact import Artifact
from tests.support.steps import write_plain_artifact


@pytest.fixture
def one(tmp_path: Path) -> Artifact:
    """Of the class `portable`."""
    return write_plain_artifact(tmp_path / "one", b"one" * 1000)


@pytest.fixture
def two(tmp_path: Path) -> Artifact:
    """Of the class `cpu-x86-64-v4`."""
    return write_plain_artifact(tmp_path / "two", b"two" * 1000, device_class="cpu-x86-64-v4")
