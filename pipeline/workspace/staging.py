"""Staging: folders for work under way, in the store and among the machine's temporary files, which are gone afterwards.

Whatever a model has made of them, and however their process ends: what one that was killed has left, the next removes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from freezer.files.atomic import WAITS_S, is_transient, make_folder, move, retried
from freezer.store.store import WORK
from pipeline.workspace.processes import boot_id, process_namespace, process_started

REMOVE_LIMIT_S = 60.0

ABANDONED_S = 8 * 86_400.0
"""Without a change, until a folder is nobody's whose owner cannot be looked at: longer than an entry's timeout_s may be."""

TEMPORARY = "coldpress-mlflow-"
"""How the names of folders begin in which artifacts are laid out for MLflow, and MLflow puts what it is about to send."""


@contextlib.contextmanager
def staging_folder(store: str) -> Iterator[Path]:
    """A folder in the store, gone afterwards; what workers of this machine that were killed have left goes now."""
    root = Path(store) / WORK / "staging"
    make_folder(root)
    remove_abandoned(store)
    folder = own_path(root.parent, os.urandom(4).hex())
    make_folder(folder, mode=0o700)
    try:
        yield folder
    finally:
        remove_tree(folder)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder among the machine's temporary files, gone afterwards; what killed processes of this user left there goes now.

    Raises:
        OSError: there is no room for it.
    """
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"{TEMPORARY}*~*"):
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid() and _owner_lives(old.name.removeprefix(TEMPORARY)) is False:
                remove_tree(old)
    folder = base / f"{TEMPORARY}{_owner_prefix()}{os.getpid()}~{os.urandom(4).hex()}"
    retried(lambda: folder.mkdir(mode=0o700, exist_ok=True))
    try:
        yield folder
    finally:
        remove_tree(folder)


def temporary_place() -> str:
    """Where this process's temporary files are, to be told to people; its own folder there is gone by the time they look."""
    if tempfile.tempdir is None:
        return "of this machine"
    folder = Path(tempfile.tempdir)
    return str(folder.parent if folder.name.startswith(TEMPORARY) else folder)


def own_path(work: Path, name: str) -> Path:
    """A path of this process's own among the staging folders: what lies there goes when the process has been killed."""
    return work / "staging" / f"{_owner_prefix()}{os.getpid()}~{name}"


def remove_tree(folder: Path) -> None:
    """Remove a folder whatever a model has made of it: folders that may not be read, or nested beyond Python's depth."""
    for wait_s in (0.0, *WAITS_S):
        time.sleep(wait_s)
        if not _leaves_for_a_moment(folder):
            break
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True, timeout=REMOVE_LIMIT_S)


def _leaves_for_a_moment(folder: Path) -> bool:
    """Remove what can be removed of a folder; whether more of it may go in a moment."""
    failed: list[BaseException] = []
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, onerror=lambda *found: failed.append(found[2][1]))
    return any(isinstance(error, OSError) and is_transient(error) for error in failed)


def remove_abandoned(store: str) -> None:
    """Remove what workers and drivers that were killed have left among the staging folders.

    Of this boot of this machine, or container, it is known who lives. Any other folder is left until nothing in it has changed for
    ABANDONED_S: it may be another machine's, or of one that will never be again, as pods are.
    """
    for folder in (Path(store) / WORK / "staging").glob("*~*"):
        alive = _owner_lives(folder.name)
        if alive is False or (alive is None and _is_unchanged_since(time.time() - ABANDONED_S, folder)):
            remove_tree(folder)


def leads_to_abandoned(link: Path, ours: Path) -> bool:
    """Whether a link leads into a staging folder that is nobody's any more.

    One whose owner lives is left, unless that is the owner of `ours` and it leads nowhere: another may have mounted the store
    elsewhere. One of an owner that nobody knows must be old, and lead nowhere.

    Raises:
        OSError: it is gone, or none.
    """
    name = link.readlink().parent.name
    match _owner_lives(name):
        case False:
            return True
        case True:
            return name.rpartition("~")[0] == ours.name.rpartition("~")[0] and not link.exists()
        case _:
            return link.lstat().st_mtime < time.time() - ABANDONED_S and not link.exists()


def _owner_lives(name: str) -> bool | None:
    """Whether the owner of a staging folder of that name lives; None where it is not of this boot of this machine, or container.

    A file that is being written there has a dot before its name.
    """
    mine, name = _owner_prefix(), name.removeprefix(".")
    pid = name.removeprefix(mine).partition("~")[0] if name.startswith(mine) else ""
    return process_started(int(pid)) is not None if pid.isdigit() else None


def _owner_prefix() -> str:
    """Of names of the folders of this boot of this machine; containers have processes of their own, so these count too."""
    digits = re.sub(r"\D", "", process_namespace())
    return f"{platform.node()}~{boot_id()}~{digits}~"


def _is_unchanged_since(since: float, folder: Path) -> bool:
    """Whether a folder, or file, has not changed since a time in seconds since the epoch, nor anything within it."""
    with contextlib.suppress(OSError, RecursionError):
        if os.lstat(folder).st_mtime >= since:
            return False
        for above, folders, files in os.walk(folder):
            if any(os.lstat(f"{above}/{name}").st_mtime >= since for name in (*folders, *files)):
                return False
        return True
    return False


def move_whole(source: Path, dest: Path) -> bool:
    """Move a folder to its name in one step; when another worker was first, its folder stays. False if the child removed it."""
    make_folder(dest.parent)
    try:
        move(source, dest)
    except OSError:
        if not source.exists():
            return dest.is_dir()
        if not dest.is_dir():
            raise
    return True
