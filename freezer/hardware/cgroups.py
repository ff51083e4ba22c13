"""How many threads this process may use: its affinity, and the CPU quotas of its control groups. Imports no torch.

A container with a quota of 2 CPUs on a machine of 64 sees 64 of them; torch then starts 64 threads, which the kernel stops for
most of each period. Quotas are read from `cpu.max` (cgroup v2) or `cpu.cfs_quota_us` (v1), of the process's own group and of all
above it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def available_cpus(root: Path = ROOT) -> int:
    """The CPUs that this process may use, by affinity and quota; at least 1. Of a quota of 1.5 CPUs one counts.

    Args:
        root: where /proc and the control groups are looked for.
    """
    quota = cpu_quota(root)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def thread_budget(num_threads: int, root: Path = ROOT) -> int:
    """The threads that a process may use which is set to `num_threads`: no more than it has CPUs.

    Args:
        num_threads: what torch is set to.
        root: as of `available_cpus`.
    """
    return max(1, min(num_threads, available_cpus(root)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """The CPUs that quotas leave this process, as a fraction may be; None where there is no quota, or none can be read."""
    quotas = [quota for folder in control_groups("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mount:
    """A mounted hierarchy of control groups: where it is, and which group lies at its top."""

    path: PurePosixPath
    top: PurePosixPath
    unified: bool


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of the process's groups that may have limits of a controller, each with all above it up to the mount."""
    groups = _own_groups(controller, root)
    for mount in _mounts(controller, root):
        group = groups.get(mount.unified)
        if group is None:
            continue
        # Within a container the names in /proc/self/cgroup may be the host's, and the mount's top the process's own group.
        below = group.relative_to(mount.top) if group.is_relative_to(mount.top) else PurePosixPath()
        base = _under(root, mount.path)
        folder = base / below if (base / below).is_dir() else base
        yield folder
        for above in folder.parents:
            if not above.is_relative_to(base):
                break
            yield above


def _own_groups(controller: str, root: Path) -> dict[bool, PurePosixPath]:
    """The process's groups: of cgroup v2 under True, and of v1's controller under False."""
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
    """The mounted hierarchies that have a controller, or may: proc(5), mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        where, what = fields.split(), rest.split()
        if len(where) < 5 or len(what) < 3:
            continue
        unified = what[0] == "cgroup2"
        if unified or (what[0] == "cgroup" and controller in what[2].split(",")):
            yield _Mount(path=PurePosixPath(where[4]), top=PurePosixPath(where[3]), unified=unified)


def _quota(folder: Path) -> float | None:
    """The CPUs that one group's quota allows; None where it has none."""
    together = " ".join(_lines(folder / "cpu.max")).split()
    if len(together) == 2:
        return _ratio(*together)
    quota, period = (_lines(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return _ratio(quota[0], period[0]) if quota and period else None


def _ratio(quota: str, period: str) -> float | None:
    """Of microseconds in a period; `max` and -1 are no quota."""
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
    """The memory that this process's machine or container has, in bytes.

    A container with a limit of 8 GB on a machine of 64 sees 64; beyond 8 the kernel kills. Limits are read from `memory.max`
    (cgroup v2) or `memory.limit_in_bytes` (v1), of the process's own group and of all above it.

    Args:
        root: where /proc and the control groups are looked for.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for group in control_groups("memory", root) if (limit := _limit(group)) is not None]
    return min([physical, *limits])


def _limit(group: Path) -> int | None:
    """The limit of one group; None where it has none, which v2 writes as `max` and v1 as a number near 2**63."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None
