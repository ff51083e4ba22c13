"""How this process shares the machine: it has it alone while it measures latency, and else computes
beside others.

Threads of OpenMP spin while they wait for each other. That is fastest alone. Beside another process
with as many threads, each may wait for one that has no core: a capture takes ten times as long.
libgomp hardly spins in a process with more threads than cores (GOMP_SPINCOUNT in its manual), so
one that shares the machine has further, idle threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Alone = Callable[[], AbstractContextManager[None]]
"""Returns a context manager that waits until this process has the machine alone."""

_alone: list[Alone] = [nullcontext]
_idle: list[_IdleThreads] = []


@contextmanager
def alone() -> Iterator[None]:
    """Have the machine alone, if this process shares it with others of Coldpress, and let threads
    wait as in a deployment.
    """
    with _alone[-1](), brief_waits(False):
        yield


def share_machine(by: Alone) -> None:
    """Set how this process gets the machine alone; by default it takes it to be its own."""
    _alone[:] = [by]


@contextmanager
def brief_waits(brief: bool = True) -> Iterator[None]:
    """Let threads of OpenMP sleep soon while they wait for each other, or spin as is usual."""
    before = bool(_idle)
    _set(brief)
    try:
        yield
    finally:
        _set(before)


def _set(brief: bool) -> None:
    if brief and not _idle:
        _idle.append(_IdleThreads())
    while _idle and not brief:
        _idle.pop().end()


class _IdleThreads:
    """More threads of OpenMP than cores. They belong to a thread, and end with it."""

    def __init__(self) -> None:
        self._begun, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="coldpress-idle", daemon=True)
        self._thread.start()
        self._begun.wait()

    def _run(self) -> None:
        try:
            import torch

            before, num_threads = torch.get_num_threads(), len(os.sched_getaffinity(0)) + 1
            torch.set_num_threads(num_threads)
            torch.zeros(num_threads << 16).add_(1)  # large enough for a part for each
            torch.set_num_threads(before)  # new threads inherit it
        finally:
            self._begun.set()
        self._ends.wait()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
