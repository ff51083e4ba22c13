"""The time of a machine: one judge at a time measures latency, and everything else that Coldpress
computes there pauses meanwhile.

Two files are locked with flock, whose locks end with their holder, also by kill -9:

    turn     held by the judge that measures, from when it waits for the others to pause
    compute  shared by all that compute, and held by that judge alone
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from freezer.freezing import in_hand

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

    def is_wanted(self) -> bool:
        """Whether a judge measures, or waits for the machine."""
        try:
            fcntl.flock(self._turn, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        return False

    def release(self) -> None:
        """Let a judge measure."""
        fcntl.flock(self._compute, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the share, and close the files."""
        self.release()
        self._turn.close()
        self._compute.close()


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Hold a share of the machine's time; wait for it while a judge measures."""
    share = MachineShare()
    try:
        share.take(wait=True)
        yield
    finally:
        share.close()


def is_measured() -> bool:
    """Whether a judge measures on this machine, or waits for it."""
    share = MachineShare()
    try:
        return share.is_wanted()
    finally:
        share.close()


@contextlib.contextmanager
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
