"""What a judge has in hand: the candidate that it opens, runs or times now, and which of these.

It is noted before the work starts, in memory that outlives the process once it is shared: if that
crashes, hangs or is killed, its supervisor reads which candidate was the cause. Imports no torch.
"""

from __future__ import annotations

from mmap import mmap

PREVIOUS = "previous"
"""The artifact that serves now."""

FURTHER = "further payloads"
"""What follows the verdict: payloads for further thread counts, for slow sizes, of the fallback."""

SIZE = 256
"""Bytes of the memory."""

TIME, PAUSES = SIZE - 1, SIZE - 2
"""Indices of the byte that says whether a judge measures (pipeline/workspace/machine_time.py), and
of the number of times that it was paused, modulo 256.
"""

memory: mmap | bytearray = bytearray(SIZE)
"""A name and the activity, on two lines; empty if nothing is in hand."""

held = [""]
"""Name that stays in hand while others are taken; empty without one."""


def take(name: str, activity: str = "building") -> None:
    """Have a candidate in hand until the next is taken, or "" for none."""
    name = held[0] or name
    text = f"{name}\n{activity}".encode()[:PAUSES] if name else b""
    memory[:PAUSES] = text.ljust(PAUSES, b"\0")


def hold(name: str) -> None:
    """Have one thing in hand from now on, whatever is taken."""
    held[0] = name
    take("")
