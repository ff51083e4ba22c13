"""Checks of what the kernel grants this process: CPUs, memory, clock, temporary files.

`root` is where /proc and /sys are.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from freezer.checks.findings import CheckRequest, Finding
from freezer.errors import UsageError
from freezer.files import VARIABLE, scratch_place
from freezer.hardware import ROOT, cpu_quota, machine_bytes

LEAST_MEMORY_BYTES = 2e9
"""Below this, freezing a small model may fail: torch and Inductor use about 1 GB, and each worker
more.
"""

LEAST_FREE_BYTES = 1e9
"""Free disk space below which a build or a publish may fail."""

SLOW_CLOCK_NS = 1000
"""Cost of reading a clock through a system call or a slow timer; `tsc` and `kvm-clock` take less
than 100 ns.
"""

CLOCK_SOURCE = "sys/devices/system/clocksource/clocksource0"

_NUM_READS = 1000


def check_cpus(_: CheckRequest, root: Path = ROOT) -> Iterator[Finding]:
    """CPUs by affinity and quota."""
    allowed, total, quota = len(os.sched_getaffinity(0)), os.cpu_count(), cpu_quota(root)
    usable = f"this process may use {allowed} of {total} CPUs"
    if quota is None or quota >= allowed:
        yield Finding(check="CPUs", text=f"{usable}, without a lower quota")
    elif quota == int(quota):
        yield Finding(check="CPUs", text=f"{usable}, and its control group {quota:g}")
    else:
        yield Finding(
            check="CPUs",
            level="warning",
            text=(
                f"{usable}, and its control group {quota:g}: the kernel halts it in each period,"
                " which disturbs timings"
            ),
            remedy=(
                f"docker update --cpus {max(1, round(quota))} CONTAINER   # a whole number; in"
                " Kubernetes limits.cpu"
            ),
        )


def check_memory(_: CheckRequest, root: Path = ROOT) -> Iterator[Finding]:
    """Memory of the machine or the container."""
    physical, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), machine_bytes(root)
    available = min(limit, _available_bytes())
    limited = limit < physical
    total = (
        f"{limit / 1e9:.1f} GB by its control group, of {physical / 1e9:.1f} GB"
        if limited
        else f"{physical / 1e9:.1f} GB"
    )
    text = f"{total}; {available / 1e9:.1f} GB available"
    if available >= LEAST_MEMORY_BYTES:
        yield Finding(check="memory", text=text)
        return
    remedy = (
        "docker update --memory 8g --memory-swap 8g CONTAINER"
        if limited
        else "ps -eo rss,pid,comm --sort -rss | head"
    )
    comment = (
        "in Kubernetes limits.memory"
        if limited
        else "stop what is not needed, or use a larger machine"
    )
    needed = f"freezing may need more than {LEAST_MEMORY_BYTES / 1e9:.0f} GB"
    yield Finding(
        check="memory", level="warning", text=f"{text}; {needed}", remedy=f"{remedy}   # {comment}"
    )


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def check_clock_source(_: CheckRequest, root: Path = ROOT) -> Iterator[Finding]:
    """The kernel's clock source, and how long reading the clock takes."""
    folder = root / CLOCK_SOURCE
    name = (folder / "current_clocksource").read_text().strip() if folder.is_dir() else "unknown"
    yield clock_finding(name, clock_cost_ns())


def clock_cost_ns() -> float:
    """Time to read the clock, without disturbances: the least mean of several series."""
    means = []
    for _ in range(10):
        started = time.perf_counter_ns()
        for _ in range(_NUM_READS):
            time.perf_counter_ns()
        means.append((time.perf_counter_ns() - started) / _NUM_READS)
    return min(means)


def clock_finding(name: str, cost_ns: float) -> Finding:
    """Report a clock source and its cost."""
    text = f"{name}; reading the clock takes {cost_ns:.0f} ns"
    if cost_ns < SLOW_CLOCK_NS:
        return Finding(check="clock source", text=text)
    return Finding(
        check="clock source",
        level="warning",
        text=f"{text}, which makes timings of short calls inexact",
        remedy=(
            f"cat /{CLOCK_SOURCE}/available_clocksource   # as root, write tsc or kvm-clock to"
            " current_clocksource"
        ),
    )


def check_temporary(_: CheckRequest) -> Iterator[Finding]:
    """Whether files that contain code can be written and opened in the temporary folder, and its
    free space.
    """
    try:
        place = scratch_place(executable=True)
    except UsageError as error:
        remedy = f"export {VARIABLE}=/var/tmp   # or another folder that allows it"
        yield Finding(check="temporary folder", level="error", text=error.coded, remedy=remedy)
        return
    yield space_finding("temporary folder", place, f"export {VARIABLE}=FOLDER   # on another disk")


def space_finding(check: str, folder: Path, advice: str = "") -> Finding:
    """Report the free space of a folder's file system."""
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / 1e9:.1f} GB free"
    if free >= LEAST_FREE_BYTES:
        return Finding(check=check, text=text)
    remedy = advice or f"df -h {shlex.quote(str(folder))}   # free space, or enlarge the disk"
    return Finding(
        check=check,
        level="warning",
        text=f"{text}; expected {LEAST_FREE_BYTES / 1e9:.0f} GB or more",
        remedy=remedy,
    )
