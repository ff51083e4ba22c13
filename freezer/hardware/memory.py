"""Peak memory of a block. Imports no torch."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_S = 0.05
_PAGE = resource.getpagesize()
_OWN_PROCESS = threading.Event()


@dataclass
class PeakMemory:
    """Peak resident memory that a block adds, in bytes: with that of all child processes, and what
    all children add together.
    """

    bytes: int = 0
    children_bytes: int = 0


@contextlib.contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the peak resident memory that a block adds; the figures are set when it ends.

    If the block reaches a new peak of the process, the kernel's record (VmHWM) gives it exactly.
    Otherwise, and for children, resident memory is sampled 20 times a second, which may miss short
    peaks. Mapped and shared pages count.

    Processes of Coldpress (`own_process`) reset the kernel's record for every block, so nothing is
    missed. Other processes keep theirs, which monitoring may read.
    """
    if _OWN_PROCESS.is_set():
        with contextlib.suppress(OSError):  # the kernel may not allow it
            Path("/proc/self/clear_refs").write_text("5")
    peak = PeakMemory()
    most = 0
    stop = threading.Event()
    before = _own_bytes("VmRSS")
    record_before = _own_bytes("VmHWM")
    children_before = _children_bytes("self")

    def sample() -> None:
        nonlocal most
        while not stop.wait(_SAMPLE_S):
            children = max(0, _children_bytes("self") - children_before)
            peak.children_bytes = max(peak.children_bytes, children)
            most = max(most, children + _own_bytes("VmRSS"))

    sampler = threading.Thread(target=sample, name="coldpress-memory", daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        stop.set()
        sampler.join()
        record = _own_bytes("VmHWM")
        if record > record_before:
            most = max(most, record)
        peak.bytes = max(0, most - before, _own_bytes("VmRSS") - before)


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


def _children_bytes(process: str) -> int:
    """Resident memory of all descendants of a process.

    Forks of the same size as their parent do not count: they have not started a program yet.
    """
    total = 0
    with contextlib.suppress(OSError, ValueError):  # ended meanwhile
        size, _ = _size_and_resident(process)
        children: list[str] = []
        for task in Path(f"/proc/{process}/task").iterdir():
            children += (task / "children").read_text().split()
        for child in children:
            with contextlib.suppress(OSError, ValueError):
                child_size, resident = _size_and_resident(child)
                total += (resident if child_size != size else 0) + _children_bytes(child)
    return total


def _size_and_resident(process: str) -> tuple[int, int]:
    """Virtual size and resident memory of a process, in bytes."""
    size, resident, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return int(size) * _PAGE, int(resident) * _PAGE
