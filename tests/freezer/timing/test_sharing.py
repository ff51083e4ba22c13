"""How a process shares the machine: with idle threads of OpenMP, except while it measures."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from freezer.timing import alone, brief_waits
from tests.support.raylets import wait_until


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_threads_wait_briefly_except_while_alone() -> None:
    before, count, num_cpus = threads(), torch.get_num_threads(), len(os.sched_getaffinity(0))
    with brief_waits():
        first = threads() - before
        assert len(first) > num_cpus, "more threads of OpenMP than CPUs"
        with brief_waits(), alone():
            wait_until(lambda: not first & threads(), "the idle threads end")
        again = threads() - before
        assert len(again) > num_cpus
        assert torch.get_num_threads() == count
    wait_until(lambda: not again & threads(), "the idle threads end")
