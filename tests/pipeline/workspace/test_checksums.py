"""Damage of a candidate between its build and its judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.workspace.workspace import DIGESTS, damage_of, note_digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "key"
    (folder / "payloads").mkdir(parents=True)
    (folder / "candidate.json").write_text("{}")
    (folder / "payloads" / "b1.pt").write_bytes(b"weights")
    note_digests(folder)
    return folder


def test_changed_or_missing_file_is_damage(folder: Path) -> None:
    assert damage_of(folder) is None
    (folder / "payloads" / "b1.pt").write_bytes(b"weightz")
    assert "b1.pt differs" in str(damage_of(folder))
    (folder / "candidate.json").unlink()
    assert "candidate.json is missing" in str(damage_of(folder))
    assert "other is missing" in str(damage_of(folder.with_name("other")))


def test_digests_of_earlier_releases_are_optional(folder: Path) -> None:
    (folder / DIGESTS).write_text("{")
    assert "cannot be read" in str(damage_of(folder))
    (folder / DIGESTS).unlink()
    assert damage_of(folder) is None
