"""The thread count of torch, set for a block and put back.

The count belongs to the thread that sets it: other threads that have used torch go on with their own, so calls from several Python
threads do not disturb each other. One thing goes wrong all the same: a thread that uses torch for the first time starts with what
was set last anywhere in the process, and keeps it. If a block is under way elsewhere just then, that is the block's count. A thread
whose first use of torch is a block of its own is given the count that it would have had; of others nothing is known here.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import torch


class _Known(threading.local):
    """Whether this thread's count was looked at before."""

    seen = False


_known = _Known()
_lock = threading.Lock()
_under_way: Counter[int] = Counter()
"""For each count that blocks have set, how many of them have not ended."""
_process_count: list[int] = []
"""The one count that new threads started with before the first of the blocks under way; empty when there are none."""


def own_count() -> int:
    """The thread count of torch in this thread; one that is new to torch takes none over from a block under way elsewhere."""
    if not _known.seen:
        _known.seen = True
        with _lock:
            if _process_count:
                # In a thread apart: what is set here would take the place of a count that this thread has of its own.
                apart = threading.Thread(target=_mend, name="coldpress-threads", daemon=True)
                apart.start()
                apart.join()
    return torch.get_num_threads()


def _mend() -> None:
    """Let threads that are new to torch start with the process's count, where they would with one that a block has set."""
    if _under_way[torch.get_num_threads()]:
        torch.set_num_threads(_process_count[0])


@contextlib.contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Run with a number of intra-op threads, and put this thread's own number back."""
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
