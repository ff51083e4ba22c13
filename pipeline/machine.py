"""The machine that a worker stands on: how much memory it has, limits of control groups counted. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from freezer.thread_budget import ROOT, control_groups


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
