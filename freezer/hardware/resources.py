"""CPUs and memory of this process: limits of its control groups, and peaks. Imports no torch.

A container with a quota of 2 CPUs on a machine of 64 sees all 64; torch then starts 64 threads,
which the kernel throttles. Limits are read from the process's own group and all above it: `cpu.max`
and `memory.max` (cgroup v2), or `cpu.cfs_quota_us` and `memory.limit_in_bytes` (v1). `root` is
where /proc and the control groups are looked up.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def available_cpus(root: Path = ROOT) -> int:
    """Number of CPUs that this process may use, by affinity and quota, rounded down; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def default_threads(root: Path = ROOT) -> int:
    """Number of threads that torch computes with by default: OMP_NUM_THREADS, or else one for each
    physical core that this process may use.
    """
    asked, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    if asked.isdecimal():
        return int(asked)
    cores: set[str] = set()
    for cpu in os.sched_getaffinity(0):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(_text(path) or str(cpu))
    return len(cores)


def thread_budget(num_threads: int, root: Path = ROOT) -> int:
    """Limit torch's number of threads to the available CPUs."""
    return max(1, min(num_threads, available_cpus(root)))


def counts_within(num_threads: int) -> tuple[int, ...]:
    """The thread counts to freeze for by default: `num_threads`, which decides, and the powers of
    two below, descending.
    """
    return (num_threads, *(1 << power for power in reversed(range((num_threads - 1).bit_length()))))


def cpu_quota(root: Path = ROOT) -> float | None:
    """The smallest CPU quota, which may be a fraction; None without a readable quota."""
    quotas = map(_quota, _control_groups("cpu", root))
    return min(filter(None, quotas), default=None)


def machine_bytes(root: Path = ROOT) -> int:
    """Memory of this process's machine or container, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _control_groups("memory", root):
        # `max` in v2 without a limit; v1 writes a number near 2**63
        text = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the process's groups for a controller, and of all groups above them."""
    groups: dict[str, PurePosixPath] = {}  # by controller of cgroup v1; "" for v2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    for line in _text(root / "proc/self/mountinfo").splitlines():  # proc(5)
        where, _, what = line.partition(" - ")
        kind, *_, options = what.split()
        if kind == "cgroup2":
            group = groups.get("")
        elif kind == "cgroup" and controller in options.split(","):
            group = groups.get(controller)
        else:
            continue
        if group is None:
            continue
        top, mounted = where.split()[3:5]
        base = root / mounted.lstrip("/")
        # in a container, /proc/self/cgroup may name groups of the host, and the mount start at the
        # process's own group
        folder = base / group.relative_to(top) if group.is_relative_to(top) else base
        if not folder.is_dir():
            folder = base
        for above in (folder, *folder.parents):
            if above.is_relative_to(base):
                yield above


def _quota(group: Path) -> float | None:
    """CPU quota of one group; None for `max` and -1."""
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if not quota:
        quota = _text(group / "cpu.cfs_quota_us")
        period = _text(group / "cpu.cfs_period_us")
    if not quota.isdecimal() or not period.isdecimal():
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


_OWN_PROCESS = threading.Event()


@dataclass
class PeakMemory:
    """Peak resident memory that a block adds, in bytes."""

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the peak resident memory that a block adds to this process by the kernel's record
    (VmHWM); the figure is set when the block ends. Mapped and shared pages count.

    Processes of Coldpress (`own_process`) reset the record for every block. Other processes keep
    theirs, which monitoring may read; there a block that stays below an earlier peak counts with
    what it still has at its end.
    """
    if _OWN_PROCESS.is_set():
        with suppress(OSError):  # the kernel may not allow it
            Path("/proc/self/clear_refs").write_text("5")
    peak = PeakMemory()
    before = _own_bytes("VmRSS")
    record_before = _own_bytes("VmHWM")
    try:
        yield peak
    finally:
        record = _own_bytes("VmHWM")
        most = record if record > record_before else _own_bytes("VmRSS")
        peak.bytes = max(0, most - before)


def own_process() -> None:
    """Declare that this process belongs to one build, so that `peak_memory` may reset its peak."""
    _OWN_PROCESS.set()


def peak_bytes() -> int:
    """Peak resident memory of this process; unlike `getrusage`, without the peak of the process
    that started it.
    """
    return _own_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _own_bytes(field: str) -> int:
    """A figure of /proc/self/status in bytes; 0 if the kernel does not report it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
