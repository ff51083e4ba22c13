"""Durable writes, on a disk whose steps fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freezer.files import atomic, link_or_copy, link_whole, make_folder, write_whole

STEPS = ("open", "write", "fsync", "replace", "link")


class Disk:
    """A disk whose steps fail: `errors` lists the error numbers of the next attempts by step; 0
    succeeds.
    """

    def __init__(self) -> None:
        self.errors: dict[str, Iterator[int]] = {}
        self.done: list[str] = []

    def around(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*args: Any, **named: Any) -> Any:
            number = next(self.errors.get(name, iter(())), 0)
            self.done.append(f"{name}!" if number else name)
            if number:
                raise OSError(number, os.strerror(number))
            return step(*args, **named)

        return tried


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    for name in STEPS:
        monkeypatch.setattr(os, name, found.around(name, getattr(os, name)))
    monkeypatch.setattr(atomic, "WAITS_S", (0.0, 0.0, 0.0))
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_permanent_errors_keep_the_old_file(disk: Disk, tmp_path: Path, step: str) -> None:
    (tmp_path / "file").write_bytes(b"before")
    disk.errors[step] = iter([errno.EIO] * 100)
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(tmp_path / "file", b"content")
    disk.errors.clear()
    assert (tmp_path / "file").read_bytes() == b"before"
    assert names(tmp_path) == ["file"]
    assert disk.done.count(f"{step}!") == 4


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT], ids=errno.errorcode.get
)
def test_full_disks_are_not_retried(disk: Disk, tmp_path: Path, number: int) -> None:
    disk.errors["fsync"] = iter([number])
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(tmp_path / "file", b"content")
    assert disk.done.count("fsync") == 0
    assert names(tmp_path) == []


def test_content_is_written_again_after_a_failed_sync(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux may drop unwritten pages after a failed sync."""
    plain = os.fsync

    def drops(handle: int) -> None:
        try:
            plain(handle)
        except OSError:
            os.ftruncate(handle, 0)
            raise

    monkeypatch.setattr(os, "fsync", drops)
    disk.errors["fsync"] = iter([errno.EIO])
    write_whole(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


@pytest.mark.parametrize("give", [link_or_copy, link_whole])
def test_links_across_file_systems_become_copies(
    tmp_path: Path, give: Callable[[Path, Path], None]
) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    (tmp_path / "one").write_bytes(b"content")
    dest = shared / f"coldpress-test-{os.getpid()}"
    try:
        give(tmp_path / "one", dest)
        assert dest.read_bytes() == b"content"
        assert dest.stat().st_dev != tmp_path.stat().st_dev
    finally:
        dest.unlink(missing_ok=True)


def test_folders_deleted_while_made_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name was taken, and free again when it was looked at."""
    folder = tmp_path / "folder"
    folder.mkdir()
    is_dir = Path.is_dir

    def deleted(path: Path) -> bool:
        if path == folder:
            folder.rmdir()
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", deleted)
    with pytest.raises(FileNotFoundError):
        make_folder(folder)


def test_a_file_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
