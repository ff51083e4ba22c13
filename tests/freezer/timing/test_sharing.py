"""How a process shares the machine: with idle threads of OpenMP, except while it measures."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from freezer.timing import alone, brief_waits
from tests.support.raylets import wait_until


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_threads_wait_briefly_except_while_alone() -> None:
    before, count = num_threads(), torch.get_num_threads()
    enough = before + len(os.sched_getaffinity(0)) + 1
    with brief_waits():
        assert num_threads() >= enough, "more threads of OpenMP than CPUs"
        with brief_waits(), alone():
            wait_until(lambda: num_threads() == before, "the idle threads end")
        assert num_threads() >= enough
        assert torch.get_num_threads() == count
    wait_until(lambda: num_threads() == before, "the idle threads end")
