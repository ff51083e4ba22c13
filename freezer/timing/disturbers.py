"""CPU time of the other processes on this machine, from /proc: names those that disturb a measurement. Imports no torch.

Two readings are compared. Processes that ended in between and those of other containers are not visible. A process gets the time of
its ended children at once, for all their life, so that is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MAX_NAMED = 3
"""Processes to name."""

LEAST_SHARE = 0.05
"""Share of a CPU below which a process is not named."""


def cpu_times(proc: Path = Path("/proc")) -> dict[tuple[int, str], float]:
    """CPU seconds of every visible process but this one, by pid and name."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # it ended
            continue
        start, _, rest = text.rpartition(")")  # a name may contain spaces and parentheses
        pid, _, name = start.partition(" (")
        if int(pid) != os.getpid():
            found[int(pid), name] = sum(map(int, rest.split()[11:13])) / tick  # utime and stime; proc(5)
    return found


def most_active(before: Mapping[tuple[int, str], float], now: Mapping[tuple[int, str], float], elapsed_s: float) -> str:
    """The processes that used the CPU most between two readings: `cc1plus (pid 12) 98% of a CPU, ...`; empty if none did."""
    shares = {key: (used_s - before.get(key, 0.0)) / elapsed_s for key, used_s in now.items()}
    first = sorted((key for key, share in shares.items() if share >= LEAST_SHARE), key=lambda key: -shares[key])[:MAX_NAMED]
    return ", ".join(f"{name} (pid {pid}) {shares[pid, name]:.0%} of a CPU" for pid, name in first)
