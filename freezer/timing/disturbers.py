"""CPU time of the other processes on this machine, from /proc: names those that disturb a
measurement. Imports no torch.

Two readings are compared. Processes that ended in between and those of other containers are not
visible. A process gets the time of its ended children at once, for all their life, so that is not
counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MAX_NAMED = 3
"""Processes to name."""

_LEAST_SHARE = 0.05
"""Share of a CPU below which a process is not named."""


class Usage(NamedTuple):
    """Name and CPU seconds of a process."""

    name: str
    used_s: float


def cpu_times(proc: Path = Path("/proc")) -> dict[int, Usage]:
    """CPU time of every visible process but this one, by pid."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # it ended
            continue
        start, _, rest = text.rpartition(")")  # a name may contain spaces and parentheses
        pid, _, name = start.partition(" (")
        if int(pid) != os.getpid():
            found[int(pid)] = Usage(
                name, sum(map(int, rest.split()[11:13])) / tick
            )  # utime and stime; proc(5)
    return found


def most_active(before: Mapping[int, Usage], now: Mapping[int, Usage], elapsed_s: float) -> str:
    """The processes that used the CPU most between two readings: `cc1plus (pid 12) 98% of a CPU,
    ...`; empty if none did.
    """
    shares = {
        pid: (used_s - (before[pid].used_s if pid in before else 0.0)) / elapsed_s
        for pid, (_, used_s) in now.items()
    }
    first = sorted(
        (pid for pid, share in shares.items() if share >= _LEAST_SHARE),
        key=lambda pid: -shares[pid],
    )[:MAX_NAMED]
    return ", ".join(f"{now[pid].name} (pid {pid}) {shares[pid]:.0%} of a CPU" for pid in first)
