"""CPU quotas and memory limits of this process's control groups. Imports no torch.

A container with a quota of 2 CPUs on a machine of 64 sees all 64; torch then starts 64 threads, which the kernel throttles. Limits
are read from the process's own group and all above it: `cpu.max` and `memory.max` (cgroup v2), or `cpu.cfs_quota_us` and
`memory.limit_in_bytes` (v1). `root` is where /proc and the control groups are looked up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def available_cpus(root: Path = ROOT) -> int:
    """Number of CPUs that this process may use, by affinity and quota, rounded down; at least 1."""
    quota = cpu_quota(root)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def thread_budget(num_threads: int, root: Path = ROOT) -> int:
    """Limit torch's number of threads to the available CPUs."""
    return max(1, min(num_threads, available_cpus(root)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """The smallest CPU quota, which may be a fraction; None without a readable quota."""
    quotas = [quota for folder in control_groups("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mount:
    """A mounted hierarchy of control groups: its path, and the group at its top."""

    path: PurePosixPath
    top: PurePosixPath
    unified: bool


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Folders of the process's groups for a controller, and of all groups above them."""
    groups = _own_groups(controller, root)
    for mount in _mounts(controller, root):
        group = groups.get(mount.unified)
        if group is None:
            continue
        # in a container, /proc/self/cgroup may name groups of the host, and the mount start at the process's own group
        below = group.relative_to(mount.top) if group.is_relative_to(mount.top) else PurePosixPath()
        base = _under(root, mount.path)
        folder = base / below if (base / below).is_dir() else base
        yield folder
        for above in folder.parents:
            if not above.is_relative_to(base):
                break
            yield above


def _own_groups(controller: str, root: Path) -> dict[bool, PurePosixPath]:
    """The process's group of cgroup v2 (True) and of the v1 controller (False)."""
    found: dict[bool, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[True] = PurePosixPath(path)
        elif controller in controllers.split(","):
            found[False] = PurePosixPath(path)
    return found


def _mounts(controller: str, root: Path) -> Iterator[_Mount]:
    """Mounted hierarchies that may have a controller: proc(5), mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        where, what = fields.split(), rest.split()
        if len(where) < 5 or len(what) < 3:
            continue
        unified = what[0] == "cgroup2"
        if unified or (what[0] == "cgroup" and controller in what[2].split(",")):
            yield _Mount(path=PurePosixPath(where[4]), top=PurePosixPath(where[3]), unified=unified)


def _quota(folder: Path) -> float | None:
    """The CPU quota of one group; None without one."""
    together = " ".join(_lines(folder / "cpu.max")).split()
    if len(together) == 2:
        return _ratio(*together)
    quota, period = (_lines(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return _ratio(quota[0], period[0]) if quota and period else None


def _ratio(quota: str, period: str) -> float | None:
    """Quota over period, both in microseconds; None for `max` and -1."""
    try:
        allowed, of = int(quota), int(period)
    except ValueError:
        return None
    return allowed / of if allowed > 0 and of > 0 else None


def _under(root: Path, path: PurePosixPath) -> Path:
    return root / path.relative_to("/") if path.is_absolute() else root / path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def machine_bytes(root: Path = ROOT) -> int:
    """Memory of this process's machine or container, in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for group in control_groups("memory", root) if (limit := _limit(group)) is not None]
    return min([physical, *limits])


def _limit(group: Path) -> int | None:
    """The memory limit of one group; None without one (`max` in v2; v1 writes a number near 2**63)."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None
