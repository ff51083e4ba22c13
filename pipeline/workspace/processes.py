"""Process trees on Linux: find, measure and end everything that a process has started. Imports no
torch.

A subreaper becomes the parent of every orphan below it. So processes that its children start stay
among its descendants, even after `setsid` and a double fork, and it can kill and reap each of them.

Children are read from /proc/PID/task/*/children. psutil looks at every process of the machine
instead: 13 ms against 0.04 ms with 148 processes, ten times a second next to a judge that measures
latency.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

KILL_WAIT_S = 30.0
"""Time to wait for killed processes.

One that the kernel does not release (a dead network disk) is left behind.
"""


def become_subreaper() -> None:
    """Make this process the parent of all orphans below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; exit if it has ended
    already.
    """
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG,
        signal.SIGKILL,
        0,
        0,
        0,
    )
    if os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started or adopted, including zombies."""
    pids: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                pids += map(int, (thread / "children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    """Return all processes below one, parents first.

    A process that is being forked may be missing.
    """
    pids = children(pid)
    for child in pids:
        pids += children(child)
    return pids


def tree_bytes(child: int, pids: Sequence[int]) -> int:
    """Return the resident memory of processes, in bytes.

    A fork of `child` that has not started its own program shares the memory of `child`: it is not
    counted.
    """
    sizes = {}
    for pid in pids:
        with suppress(psutil.Error):
            sizes[pid] = psutil.Process(pid).memory_info()
    whole = sizes[child].vms if child in sizes else None
    return sum(size.rss for pid, size in sizes.items() if pid == child or size.vms != whole)


def reap() -> dict[int, int]:
    """Reap the children of this process that have ended; return their wait statuses by pid."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = status
    return ended


def kill_descendants() -> dict[int, int]:
    """Kill and reap everything below this process, a subreaper; return the wait statuses of its
    children by pid.

    This process adopts the children of killed processes, and killed processes fork no more: each
    round finds fewer, until no child is left.
    """
    ended: dict[int, int] = {}
    deadline = time.monotonic() + KILL_WAIT_S
    wait_s = 0.002
    while time.monotonic() < deadline:
        kill(descendants(os.getpid()))
        ended |= reap()
        if not children(os.getpid()):
            break
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.2)  # hundreds of dying processes need the CPUs for themselves
    return ended


def kill(pids: Collection[int]) -> None:
    """Kill processes; see `signal_all`."""
    signal_all(pids, signal.SIGKILL)


def signal_all(pids: Collection[int], number: signal.Signals) -> None:
    """Send a signal to processes. Ignore those that have ended or belong to another user."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def oom_score(value: int) -> None:
    """Set how soon the OOM killer takes this process: 1000 is first.

    Lowering it may not be allowed.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(value))


def be_nice(value: int) -> None:
    """Set the niceness of this process, and of its session where the kernel schedules sessions
    (autogroup), which ignores that of processes in different ones. Lowering it may not be allowed.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, value)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(value))


def boot_id() -> str:
    """Return the id of this boot of this machine; empty if the kernel has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_namespace() -> str:
    """Return the kernel's name of the process namespace. Within a boot, it makes a pid unique."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def process_started(pid: int) -> int | None:
    """Return the start of a process of this namespace, in clock ticks since the boot; None if it
    has ended or is a zombie.

    Leases store this number, so it comes from /proc and not from psutil, which converts it to
    seconds.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else int(after_name[19])
