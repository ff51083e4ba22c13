"""The C heap of a process that lives for long: a driver makes and frees buffers for each of thousands of outcomes."""

from __future__ import annotations

import contextlib
import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Of glibc's malloc.h."""

MMAP_BYTES = 128 * 1024
"""glibc's own threshold at the start, which it raises up to 32 MB when larger blocks are freed; what lies on the heap from then on
keeps the pages around it."""

NUM_ARENAS = 2


def keep_heap_small() -> None:
    """Give large blocks back to the system when they are freed, as glibc does at first, and keep threads to a few heaps.

    Measured with campaigns of 500 items: a driver grows by 22 MB instead of 47. Elsewhere than on glibc nothing is done.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_ARENA_MAX, NUM_ARENAS)
