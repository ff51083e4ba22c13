"""Processes: what a process has started, the memory of that, and its end. Reads Linux's /proc; imports no torch.

A subreaper is the parent of all processes that lose theirs below it. So whatever its children start, by `setsid` and forking twice
too, stays among its descendants, and it can kill and reap every one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""Whether the kernel lists the children of each thread: much quicker than to look at every process of the machine."""

KILL_WAIT_S = 30.0
"""How long killed processes are waited for; one that the kernel does not let go (a dead network disk) is left then."""


def set_subreaper(on: bool) -> None:
    """Make this process the parent of all orphans below it, or stop being that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Be a subreaper for a while."""
    set_subreaper(True)
    try:
        yield
    finally:
        set_subreaper(False)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it ends; leave at once if it did already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """The processes that a process has started or adopted; zombies among them."""
    if not _LISTS_CHILDREN:
        with contextlib.suppress(psutil.Error):
            return [process.pid for process in psutil.Process(pid).children()]
        return []
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, _read(f"{thread}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one, parents before their children. One that is forked at this moment may be missing."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def tree_bytes(child: int, pids: Sequence[int]) -> int:
    """Resident memory of processes, in bytes. A copy of `child` that has not begun its own program shares it: it is not counted."""
    sizes = {pid: size for pid in pids if (size := _sizes(pid)) is not None}
    whole = sizes[child][0] if child in sizes else None
    return sum(resident for pid, (mapped, resident) in sizes.items() if pid == child or mapped != whole) * _PAGE


def command_of(pid: int) -> str:
    """The command line of a process on one line, or its name."""
    with contextlib.suppress(OSError):
        words = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or f"[{_read(f'/proc/{pid}/comm').strip()}]"
        return " ".join(words.split())
    return "[gone]"


def reap() -> dict[int, int]:
    """The children of this process that have ended, with how: as os.waitpid tells it. The rest of them goes on."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def kill_descendants() -> dict[int, int]:
    """Kill and reap everything below this process, a subreaper; the children that ended, with how.

    Killed processes leave their own children to this one, and a killed process forks no more: so each round finds fewer, until the
    kernel says that there is no child.
    """
    ended: dict[int, int] = {}
    deadline, wait_s = time.monotonic() + KILL_WAIT_S, 0.002
    while time.monotonic() < deadline:
        kill(descendants(os.getpid()))
        ended |= reap()
        if not children(os.getpid()):
            break
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.2)  # hundreds of dying processes need the CPUs for themselves
    return ended


def kill(pids: Collection[int]) -> None:
    """Kill processes; those that are gone, or another user's, are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def oom_score(value: int) -> None:
    """Say how soon the kernel takes this process when memory runs out: 1000 is first. Lowering it may not be allowed."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(value))


def _sizes(pid: int) -> tuple[int, int] | None:
    """Mapped and resident pages of a process."""
    try:
        mapped, resident = _read(f"/proc/{pid}/statm").split()[:2]
    except (OSError, ValueError):
        return None
    return int(mapped), int(resident)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def boot_id() -> str:
    """The id of this boot of this machine; empty where the kernel shows none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_namespace() -> str:
    """The process namespace, as the kernel names it: within a boot, a pid means one process of one namespace."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def process_started(pid: int) -> int | None:
    """When a process of this namespace started, in clock ticks since the boot; None of one that is not there, or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else int(after_name[19])
