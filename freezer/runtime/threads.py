"""Set torch's thread count for a block, and restore it.

The count belongs to the thread that sets it, so calls from several Python threads do not affect
each other. But a thread that uses torch for the first time inherits the count that was last set
anywhere in the process, possibly by a block in another thread. `own_count` corrects this for
threads that call it, or enter a block, before they use torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import torch


class _Known(threading.local):
    """Whether this thread has called `own_count`."""

    seen = False


_known = _Known()
_lock = threading.Lock()
_under_way: Counter[int] = Counter()
"""Number of running blocks by the count they set."""
_process_count: list[int] = []
"""The count that new threads inherited before the first running block; empty without blocks."""


def own_count() -> int:
    """Thread count of torch in this thread, not inherited from a block in another thread."""
    if not _known.seen:
        _known.seen = True
        with _lock:
            if _process_count:
                # In another thread: setting the count here would replace a count that this thread
                # has set itself.
                fixer = threading.Thread(
                    target=_fix_inherited, name="coldpress-threads", daemon=True
                )
                fixer.start()
                fixer.join()
    return torch.get_num_threads()


def _fix_inherited() -> None:
    """Let threads that are new to torch inherit the process's count, not a block's."""
    if _under_way[torch.get_num_threads()]:
        torch.set_num_threads(_process_count[0])


@contextlib.contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Run with a number of intra-op threads, and restore this thread's own."""
    before = own_count()
    if before == num_threads:
        yield
        return
    with _lock:
        if not _process_count:
            _process_count.append(before)
        _under_way[num_threads] += 1
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        with _lock:
            _under_way[num_threads] -= 1
            if not any(_under_way.values()):
                _process_count.clear()
            torch.set_num_threads(before)
