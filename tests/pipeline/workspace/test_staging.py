"""Staging folders are removed afterwards, and those of killed workers by the next one."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.workspace import (
    boot_id,
    remove_abandoned,
    staging_folder,
)
from pipeline.workspace.machine_time import ABANDONED_S
from tests.support.commands import output


def staged(store: Path) -> list[str]:
    return sorted(path.name for path in (store / ".coldpress" / "staging").iterdir())


def test_folders_of_killed_workers_are_removed(tmp_path: Path) -> None:
    dead = output("sh", "-c", "echo $$").strip()
    with staging_folder(tmp_path) as mine:
        (mine / "kept").touch()
        host, boot, namespace, pid, _ = mine.name.split("~")
        assert (host, boot, pid) == (platform.node(), boot_id(), str(os.getpid()))
        assert namespace.isdigit()
        killed = mine.with_name(f"{host}~{boot}~{namespace}~{dead}~x")
        (killed / "half").mkdir(parents=True)
        killed.with_name(f"{killed.name}-seen").touch()
        killed.with_name(f".{killed.name}-seen.0123.partial").touch()
        container = mine.with_name(f"{host}~{boot}~1{namespace}~{dead}~x")
        container.mkdir()
        elsewhere = mine.with_name(f"another-{host}~{boot}~{namespace}~{dead}~x")
        elsewhere.mkdir()
        with staging_folder(tmp_path) as next_one:
            assert staged(tmp_path) == sorted(
                path.name for path in (mine, next_one, container, elsewhere)
            )
        assert (mine / "kept").exists()
    assert staged(tmp_path) == sorted([container.name, elsewhere.name])


@pytest.mark.parametrize("boot", ["11111111-2222-3333-4444-555555555555~", ""])
def test_foreign_folders_are_removed_when_old(tmp_path: Path, boot: str) -> None:
    """Of another machine with the same host name, of an earlier boot, or named by an earlier
    release.
    """
    dead = output("sh", "-c", "echo $$").strip()
    long_ago = time.time() - ABANDONED_S - 3600
    with staging_folder(tmp_path) as mine:
        namespace = mine.name.split("~")[2]
    running, abandoned = (
        mine.with_name(f"{platform.node()}~{boot}{namespace}~{dead}~{name}") for name in "ab"
    )
    pod = mine.with_name(f"a-pod-that-was~{boot}{namespace}~{dead}~x")
    for folder in (running, abandoned, pod):
        folder.mkdir()
    for folder in (abandoned, pod):
        os.utime(folder, (long_ago, long_ago))
    remove_abandoned(tmp_path)
    assert staged(tmp_path) == [running.name]


def test_folders_are_removed_by_several_at_once(tmp_path: Path) -> None:
    long_ago = time.time() - ABANDONED_S - 3600
    for number in range(300):
        folder = tmp_path / ".coldpress" / "staging" / f"a-pod-that-was~1~{number}~x"
        folder.mkdir(parents=True)
        os.utime(folder, (long_ago, long_ago))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(remove_abandoned, [tmp_path] * 4))
    assert staged(tmp_path) == []
