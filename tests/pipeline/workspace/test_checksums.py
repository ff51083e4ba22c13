"""Whether a candidate is still what was built."""

from __future__ import annotations

from pathlib import Path

from pipeline.workspace.checksums import DIGESTS, damage_of, note_digests


def candidate(folder: Path) -> Path:
    (folder / "payloads").mkdir(parents=True)
    (folder / "candidate.json").write_text("{}")
    (folder / "payloads" / "b1.pt").write_bytes(b"weights")
    note_digests(folder)
    return folder


def test_a_candidate_is_whole_until_a_byte_of_it_changes(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "key")
    assert damage_of(folder) is None
    (folder / "payloads" / "b1.pt").write_bytes(b"weightz")
    assert damage_of(folder) == f"{folder}/payloads/b1.pt is not what was built"


def test_a_file_or_folder_that_is_gone_is_damage(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "key")
    (folder / "candidate.json").unlink()
    assert damage_of(folder) == f"{folder}/candidate.json is missing"
    assert damage_of(tmp_path / "other") == f"{tmp_path}/other is gone"


def test_damaged_digests_are_damage_and_none_are_of_an_earlier_release(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "key")
    (folder / DIGESTS).write_text("{")
    assert f"{folder} cannot be read" in str(damage_of(folder))
    (folder / DIGESTS).unlink()
    assert damage_of(folder) is None
