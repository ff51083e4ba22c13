"""The most memory that a block needs. Imports no torch."""

from __future__ import annotations

import contextlib
import resource
import threading
from pathlib import Path
from types import TracebackType

_SELF = Path("/proc/self")
_SAMPLE_S = 0.05


class PeakMemory:
    """The most resident memory, in bytes, that a block takes above what the process held before it, with that of its children.

        with PeakMemory() as peak:
            ...
        peak.bytes

    Where the process takes more within the block than ever before, its peak is the kernel's (VmHWM), to the page. Else, and for
    compilers and other children, resident memory is looked at 20 times a second, and what is shorter may be missed. Resident are
    pages of files that the process maps too, also those that it shares.

    A process of Coldpress's own (`own_process`) begins its record anew with every block, so that nothing short is missed. That of
    a caller is left as it is: whatever watches the process reads it too.

    Attributes:
        bytes: None where the system does not tell: only Linux does.
        children_bytes: the most that the children had at one time, above what they held before; within `bytes` as far as it came
            together with the rest.
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
    """Say that this process is there for one build alone: then nobody else reads its record of the most memory that it took."""
    _OWN_PROCESS.set()


def peak_bytes() -> int:
    """The most memory that was resident in this process.

    Not what `getrusage` tells where the system tells more: a process that another started begins there with that other's peak.
    """
    return _own("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _own(field: str) -> int | None:
    """A figure of /proc/self/status in bytes."""
    try:
        lines = (_SELF / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _reset_peak() -> None:
    """Let the record of the most resident memory begin anew with what is resident; a kernel that refuses leaves it as it is."""
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def _children_bytes(process: str) -> int:
    """Resident memory of all that a process started, and what that started.

    A child that is as large as its parent, to the byte, is left out: it has not begun a program of its own, and its memory is its
    parent's.
    """
    total = 0
    try:
        size, _ = _size_and_resident(process)
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except (OSError, ValueError):  # it has ended meanwhile, or this kernel does not tell
        return 0
    for child in children:
        try:
            child_size, resident = _size_and_resident(child)
        except (OSError, ValueError):
            continue
        total += (resident if child_size != size else 0) + _children_bytes(child)
    return total


def _size_and_resident(process: str) -> tuple[int, int]:
    """Of a process, in bytes."""
    size, resident, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return int(size) * _PAGE, int(resident) * _PAGE


_PAGE = resource.getpagesize()
