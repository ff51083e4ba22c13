"""The C heap of a driver: what is freed goes back to the system."""

from __future__ import annotations

import ctypes
import platform

import pytest

from tests.steps import python

BLOCKS = """
import ctypes, sys
from pipeline.run import keep_heap_small

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in NAMES.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = Info, ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_heap_small()
libc.free(libc.malloc(20_000_000))  # from now on glibc puts blocks of up to 20 MB on the heap
before = libc.mallinfo2().hblks
held = libc.malloc(1_000_000)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later"
)
@pytest.mark.parametrize(("how", "mapped"), [("kept", "1"), ("as it is", "0")])
def test_large_blocks_are_mapped_also_after_larger_ones_were_freed(how: str, mapped: str) -> None:
    assert python(BLOCKS, how).splitlines()[-1] == mapped


LOOKS = """
import gc, sys
from pipeline.run import collect_rarely

if sys.argv[1] == "rarely":
    collect_rarely()
before = gc.get_stats()[0]["collections"]
kept = [[] for _ in range(200_000)]
print(gc.get_stats()[0]["collections"] - before > 10)
"""


@pytest.mark.parametrize(("how", "often"), [("rarely", "False"), ("as it is", "True")])
def test_what_is_kept_is_seldom_looked_through_for_garbage(how: str, often: str) -> None:
    assert python(LOOKS, how).splitlines()[-1] == often
