"""Staging folders in the store for work in progress.

They are removed afterwards with everything in them. The next process removes the folders of killed
ones.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from freezer.files import WAITS_S, make_folder, move
from freezer.store import WORK
from pipeline.workspace.processes import boot_id, process_namespace, process_started

REMOVE_LIMIT_S = 60.0

ABANDONED_S = 8 * 86_400.0
"""Age at which a folder of an unknown owner is removed: longer than an entry's timeout_s may be."""


@contextlib.contextmanager
def staging_folder(store: str) -> Iterator[Path]:
    """Yield a new folder in the store and remove it afterwards.

    Remove those of killed workers of this machine first.
    """
    root = Path(store) / WORK / "staging"
    make_folder(root)
    remove_abandoned(store)
    folder = own_path(root.parent, os.urandom(4).hex())
    make_folder(folder, mode=0o700)
    try:
        yield folder
    finally:
        remove_tree(folder)


def own_path(work: Path, name: str) -> Path:
    """Return a path among the staging folders that belongs to this process, and is removed after it
    was killed.
    """
    return work / "staging" / f"{_owner_prefix()}{os.getpid()}~{name}"


def remove_tree(folder: Path) -> None:
    """Remove a folder, even with unreadable folders in it, or nested deeper than Python's recursion
    limit.
    """
    for wait_s in (0.0, *WAITS_S):
        time.sleep(wait_s)
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run(
                [*command, "--", str(folder)],
                check=False,
                capture_output=True,
                timeout=REMOVE_LIMIT_S,
            )


def remove_abandoned(store: str) -> None:
    """Remove the staging folders of killed workers and drivers.

    Only owners of this boot of this machine or container can be checked. Folders of others, such as
    former pods, are removed at the age of ABANDONED_S.
    """
    for folder in (Path(store) / WORK / "staging").glob("*~*"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            alive = _owner_lives(folder.name)
            if alive is False or (
                alive is None and folder.lstat().st_mtime < time.time() - ABANDONED_S
            ):
                remove_tree(folder)


def _owner_lives(name: str) -> bool | None:
    """Whether the owner of a staging folder lives; None if it is not of this boot of this machine
    or container.

    A file that is being written has a dot before its name.
    """
    mine = _owner_prefix()
    name = name.removeprefix(".")
    pid = name.removeprefix(mine).partition("~")[0] if name.startswith(mine) else ""
    return process_started(int(pid)) is not None if pid.isdigit() else None


def _owner_prefix() -> str:
    """Return the prefix of folder names of this boot of this machine and process namespace."""
    digits = re.sub(r"\D", "", process_namespace())
    return f"{platform.node()}~{boot_id()}~{digits}~"


def move_whole(source: Path, dest: Path) -> None:
    """Move a folder to its name atomically. A folder that is there already stays."""
    make_folder(dest.parent)
    try:
        move(source, dest)
    except OSError:
        if not dest.is_dir():
            raise
