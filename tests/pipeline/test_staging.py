"""Staging folders: gone afterwards, and gone soon when their worker was killed."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
from pathlib import Path

import pytest

from pipeline.staging import move_whole, staging_folder


def staged(store: Path) -> list[str]:
    return sorted(path.name for path in (store / ".coldpress" / "staging").iterdir())


def test_a_workers_next_folder_removes_what_killed_workers_of_its_machine_left(tmp_path: Path) -> None:
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    with staging_folder(str(tmp_path)) as mine:
        (mine / "kept").touch()
        namespace = mine.name.split("~")[1]
        assert namespace.isdigit()
        killed = mine.with_name(f"{platform.node()}~{namespace}~{dead}~x")
        (killed / "half").mkdir(parents=True)
        killed.with_name(f"{killed.name}-seen").touch()
        container = mine.with_name(f"{platform.node()}~1{namespace}~{dead}~x")
        container.mkdir()
        elsewhere = mine.with_name(f"another-{platform.node()}~{namespace}~{dead}~x")
        elsewhere.mkdir()
        with staging_folder(str(tmp_path)) as next_one:
            assert staged(tmp_path) == sorted(path.name for path in (mine, next_one, container, elsewhere))
        assert (mine / "kept").exists()
    assert staged(tmp_path) == sorted([container.name, elsewhere.name])


def test_a_result_that_cannot_be_moved_at_once_is_moved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, answers = os.replace, iter([errno.ESTALE, errno.EIO])

    def replace(source: Path, dest: Path) -> None:
        if number := next(answers, 0):
            raise OSError(number, os.strerror(number))
        plain(source, dest)

    monkeypatch.setattr(os, "replace", replace)
    (tmp_path / "result").mkdir()
    assert move_whole(tmp_path / "result", tmp_path / "candidates" / "key")
    assert (tmp_path / "candidates" / "key").is_dir()
    assert not (tmp_path / "result").exists()
