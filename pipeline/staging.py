"""Staging: folders for work under way in the store, which are gone afterwards, whatever a model has made of them."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from freezer.durable import move, retried
from freezer.store import WORK

REMOVE_LIMIT_S = 60.0


@contextlib.contextmanager
def staging_folder(store: str) -> Iterator[Path]:
    """A folder in the store, gone afterwards; what workers of this machine that were killed have left goes now."""
    root = Path(store) / WORK / "staging"
    root.mkdir(parents=True, exist_ok=True)
    remove_abandoned(store)
    folder = own_path(root.parent, os.urandom(4).hex())
    retried(lambda: folder.mkdir(mode=0o700, exist_ok=True))
    try:
        yield folder
    finally:
        remove_tree(folder)


def own_path(work: Path, name: str) -> Path:
    """A path of this process's own among the staging folders: what lies there goes when the process has been killed."""
    return work / "staging" / f"{_owner_prefix()}{os.getpid()}~{name}"


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever a model has made of it: folders that may not be read, or nested beyond Python's depth."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True, timeout=REMOVE_LIMIT_S)


def remove_abandoned(store: str) -> None:
    """Remove what workers and drivers of this machine, or container, that were killed have left among the staging folders."""
    mine = _owner_prefix()
    for folder in (Path(store) / WORK / "staging").glob(f"{glob.escape(mine)}*"):
        pid = int(folder.name.removeprefix(mine).partition("~")[0])
        if not Path(f"/proc/{pid}").exists():
            remove_tree(folder)


def _owner_prefix() -> str:
    """Of names of this machine's folders; containers that share a host's name have processes of their own, so these count too."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    return f"{platform.node()}~{namespace}~"


def move_whole(source: Path, dest: Path) -> bool:
    """Move a folder to its name in one step; when another worker was first, its folder stays. False if the child removed it."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    try:
        move(source, dest)
    except OSError:
        if not source.exists():
            return dest.is_dir()
        if not dest.is_dir():
            raise
    return True
