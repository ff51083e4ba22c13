"""Checks of the places for results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from freezer.errors import UsageError
from freezer.files import check_file, check_folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, beside a folder with a file and links to both."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize(
    ("check", "path"),
    [
        (check_folder, "deep/er/new"),
        (check_folder, "../empty"),
        (check_file, "deep/er/new.json"),
        (check_file, "../full/mine"),
    ],
)
def test_writable_places_are_accepted(
    here: Path, check: Callable[[Path, str], None], path: str
) -> None:
    before = sorted(here.rglob("*"))
    check(Path(path), "--out")
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("check", "path", "message"),
    [
        (check_folder, ".", r"^--out \. is not empty or the working directory; name a new folder"),
        (check_folder, "../here", "the working directory"),
        (
            check_folder,
            "../full/mine",
            r"^--out \.\./full/mine is a file or a link; name a new folder",
        ),
        (check_folder, "../link", "is a file or a link"),
        (
            check_folder,
            "../full/mine/new",
            r"/here/\.\./full/mine is not a folder; name a path inside a folder",
        ),
        (check_file, "../full", r"^--out \.\./full is a folder; name a file"),
        (
            check_file,
            "../full/mine/new.json",
            "/full/mine is not a folder; name a path inside a folder",
        ),
    ],
)
def test_other_places_are_rejected(
    here: Path, check: Callable[[Path, str], None], path: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check(Path(path), "--out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("check", [check_folder, check_file])
def test_read_only_folders_are_rejected(here: Path, check: Callable[[Path, str], None]) -> None:
    (here / "empty").chmod(0o555)
    with pytest.raises(UsageError):
        check(here / "empty" / "deep" / "new", "--out")
