"""Peak memory of a block. Imports no torch."""

from __future__ import annotations

import contextlib
import resource
import threading
from pathlib import Path
from types import TracebackType

_SELF = Path("/proc/self")
_SAMPLE_S = 0.05


class PeakMemory:
    """Measure the peak resident memory that a block adds, in bytes, including that of child processes.

        with PeakMemory() as peak:
            ...
        peak.bytes

    If the block reaches a new peak of the process, the kernel's record (VmHWM) gives it exactly. Otherwise, and for children,
    resident memory is sampled 20 times a second, which may miss short peaks. Mapped and shared pages count.

    Processes of Coldpress (`own_process`) reset the kernel's record for every block, so nothing is missed. Other processes keep
    theirs, which monitoring may read.

    Attributes:
        bytes: None except on Linux.
        children_bytes: peak that all children add together.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self.children_bytes = 0
        self._before = 0
        self._record_before = 0
        self._children_before = 0
        self._seen = 0
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        before = _own("VmRSS")
        if before is None:
            return self
        if _OWN_PROCESS.is_set():
            _reset_peak()
        self._before, self._record_before, self._children_before = before, _own("VmHWM") or 0, _children_bytes("self")
        self._sampler = threading.Thread(target=self._sample, name="coldpress-memory", daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sampler is None:
            return
        self._stop.set()
        self._sampler.join()
        record = _own("VmHWM") or 0
        most = max(self._seen, _own("VmRSS") or 0, record if record > self._record_before else 0)
        self.bytes = max(0, most - self._before)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            children = max(0, _children_bytes("self") - self._children_before)
            self.children_bytes = max(self.children_bytes, children)
            self._seen = max(self._seen, children + (_own("VmRSS") or 0))


_OWN_PROCESS = threading.Event()


def own_process() -> None:
    """Declare that this process belongs to one build, so that PeakMemory may reset its peak."""
    _OWN_PROCESS.set()


def peak_bytes() -> int:
    """Peak resident memory of this process; unlike `getrusage`, without the peak of the process that started it."""
    return _own("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _own(field: str) -> int | None:
    """A figure of /proc/self/status in bytes."""
    try:
        lines = (_SELF / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _reset_peak() -> None:
    """Reset the kernel's record of peak memory, if the kernel allows it."""
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def _children_bytes(process: str) -> int:
    """Resident memory of all descendants of a process.

    Forks of the same size as their parent do not count: they have not started a program yet.
    """
    total = 0
    try:
        size, _ = _size_and_resident(process)
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except (OSError, ValueError):  # ended meanwhile
        return 0
    for child in children:
        try:
            child_size, resident = _size_and_resident(child)
        except (OSError, ValueError):
            continue
        total += (resident if child_size != size else 0) + _children_bytes(child)
    return total


def _size_and_resident(process: str) -> tuple[int, int]:
    """Virtual size and resident memory of a process, in bytes."""
    size, resident, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return int(size) * _PAGE, int(resident) * _PAGE


_PAGE = resource.getpagesize()
