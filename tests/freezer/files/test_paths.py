"""Checks of the places for results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from freezer.errors import UsageError
from freezer.files.paths import check_file, check_folder, made_parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, beside a folder with a file and links to both."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize("path", ["new", "deep/er/new", "../empty", "../full/new"])
def test_new_and_empty_folders_are_accepted(here: Path, path: str) -> None:
    before = sorted(here.rglob("*"))
    check_folder(Path(path), "--out")
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", r"^--out \. is the working directory, .*; name a new folder"),
        ("../here", "is the working directory"),
        ("..", r"^--out \.\. ends in `\.\.`; name the new folder itself"),
        ("new/..", r"^--out new/\.\. ends in"),
        ("/", "^--out / is not empty; name a new folder"),
        ("../full", r"^--out \.\./full is not empty; name a new folder"),
        ("../full/mine", r"^--out \.\./full/mine is a file or a link; name a new folder"),
        ("../link", "is a file or a link"),
        ("../dangling", "is a file or a link"),
        ("../full/mine/new", r"^--out \.\./full/mine/new: .*/here/\.\./full/mine is not a folder; name a path inside a folder"),
        ("x" * 300, "cannot be written: .*File name too long; name another folder"),
        ("a\0b", r"'a\\x00b' cannot be written: .*null"),
    ],
)
def test_check_folder_rejects(here: Path, path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_folder(Path(path), "--out")


@pytest.mark.parametrize("path", ["new.json", "deep/er/new.json", "../full/mine", "../full/new.json"])
def test_new_and_existing_files_are_accepted(here: Path, path: str) -> None:
    before = sorted(here.rglob("*"))
    check_file(Path(path), "--json")
    assert sorted(here.rglob("*")) == before
    assert made_parent(Path(path)).parent.is_dir()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", r"^--json \. is a folder; name a file"),
        ("../full", r"^--json \.\./full is a folder; name a file"),
        ("../full/mine/new.json", "/full/mine is not a folder; name a path inside a folder"),
        ("x" * 300, "cannot be written: .*File name too long; name another file"),
    ],
)
def test_check_file_rejects(here: Path, path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_file(Path(path), "--json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("check", [check_folder, check_file])
def test_read_only_folders_are_rejected(here: Path, check: Callable[[Path, str], None]) -> None:
    (here / "empty").chmod(0o555)
    with pytest.raises(UsageError, match=r"no permission to write into .*/empty; name another path"):
        check(here / "empty" / "deep" / "new", "--out")
