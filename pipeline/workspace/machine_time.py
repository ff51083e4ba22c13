"""Staging folders in a store, and the time of a machine: one judge at a time measures latency, and
everything else that Coldpress computes there pauses meanwhile.

Two files are locked with flock, whose locks end with their holder, also by kill -9:

    turn     held by the judge that measures, from when it waits for the others to pause
    compute  shared by all that compute, and held by that judge alone
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path

from freezer.files import WAITS_S, make_folder, move
from freezer.freezing import in_hand
from freezer.store import WORK
from pipeline.workspace.processes import boot_id, process_namespace, process_started

_MEMORY = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
"""Shared by all processes of a machine or container, whatever their TMPDIR."""

COMPUTES, WAITS, MEASURES = range(3)
"""What the child of a judge does, for its supervisor (in_hand.memory)."""


def lock_file(name: str) -> FileIO:
    """Open one of the two files of this machine and user."""
    folder = _MEMORY / f"coldpress-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return open(folder / name, "ab", buffering=0)


class MachineShare:
    """A share of the machine's time, which a process holds while it computes."""

    def __init__(self) -> None:
        self._turn = lock_file("turn")
        self._compute = lock_file("compute")

    def take(self, *, wait: bool = False) -> bool:
        """Take or keep the share, unless a judge measures or waits for the machine; return whether
        it may be used.

        Args:
            wait: wait until no judge does.
        """
        how = fcntl.LOCK_SH if wait else fcntl.LOCK_SH | fcntl.LOCK_NB
        try:
            fcntl.flock(self._turn, how)
            fcntl.flock(self._compute, how)
        except BlockingIOError:
            return False
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
        return True

    def release(self) -> None:
        """Let a judge measure."""
        fcntl.flock(self._compute, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the share, and close the files."""
        self.release()
        self._turn.close()
        self._compute.close()


@contextmanager
def computing() -> Iterator[None]:
    """Hold a share of the machine's time; wait for it while a judge measures."""
    with closing(MachineShare()) as share:
        share.take(wait=True)
        yield


def is_measured() -> bool:
    """Whether a judge measures on this machine, or waits for it."""
    with lock_file("turn") as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(turn, fcntl.LOCK_UN)
        return False


@contextmanager
def alone() -> Iterator[None]:
    """In the child of a judge: have the machine alone, once everything else has paused.

    The locks end before it computes again: its supervisor would stop it with them. They are
    unlocked, since closing leaves them to forks of this process.
    """
    with lock_file("turn") as turn, lock_file("compute") as compute:
        try:
            in_hand.memory[in_hand.TIME] = WAITS
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(compute, fcntl.LOCK_EX)
            in_hand.memory[in_hand.TIME] = MEASURES
            yield
        finally:
            fcntl.flock(compute, fcntl.LOCK_UN)
            fcntl.flock(turn, fcntl.LOCK_UN)
            in_hand.memory[in_hand.TIME] = COMPUTES


ABANDONED_S = 8 * 86_400.0
"""Age at which a folder of an unknown owner is removed: longer than an entry's timeout_s may be."""


@contextmanager
def staging_folder(store: Path) -> Iterator[Path]:
    """Yield a new folder in the store and remove it afterwards.

    Remove those of killed workers of this machine first.
    """
    remove_abandoned(store)
    folder = own_path(store / WORK, os.urandom(4).hex())
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
    """Remove a folder or file; what a disk keeps is left to `remove_abandoned`."""
    for wait_s in (0.0, *WAITS_S):
        time.sleep(wait_s)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.unlink(missing_ok=True)
        if not folder.exists():
            return


def remove_abandoned(store: Path) -> None:
    """Remove the staging folders of killed workers and drivers.

    Only owners of this boot of this machine or container can be checked. Folders of others, such as
    former pods, are removed at the age of ABANDONED_S.
    """
    for folder in (store / WORK / "staging").glob("*~*"):
        with suppress(OSError):  # another process may remove it meanwhile
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
