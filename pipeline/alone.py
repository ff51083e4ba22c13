"""Alone: what a judge asks of the kernel besides a node that runs nothing else. Imports no torch.

A judge is not pinned to single CPUs. Two of them on one machine (two pods, two containers) would choose the same ones, and each
would take half of every CPU while the others idle; the kernel keeps them apart. Its affinity is its node's, and is recorded.
"""

from __future__ import annotations

import contextlib
import os

NICENESS = (-10, 0)
"""Tried in this order: before all others where the process may be, else no worse than others."""


def come_first() -> int:
    """Run this process, and all threads that it starts from now on, at the best niceness that it may have; which that is.

    Ray runs workers at 15 unless it is told otherwise, and a process without the right to may not go back from there.
    """
    for wanted in NICENESS:
        if os.getpriority(os.PRIO_PROCESS, 0) <= wanted:
            break
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, wanted)
            break
    return os.getpriority(os.PRIO_PROCESS, 0)
