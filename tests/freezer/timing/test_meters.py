"""Meters: device events around each call, and detection of other processes on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from freezer.hardware import NvmlError, Reading
from freezer.timing import CpuMeter, meter_of, sample
from freezer.timing.meters import GpuMeter, Usage, most_active, process_times
from freezer.timing.sampling import TELLING_S
from tests.support.steps import QUICK

QUIET = Reading(others=0, sm_clock_mhz=1980, memory_clock_mhz=3201, temperature_c=40)


class Event:
    """torch.cuda.Event by the process's clock."""

    def __init__(self) -> None:
        self.at = 0.0
        self.waited = False

    def record(self) -> None:
        self.at, self.waited = time.perf_counter(), False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end_event: Any) -> float:
        assert end_event.waited
        return (float(end_event.at) - self.at) * 1e3


def meter(read: Callable[[], Reading] | None) -> GpuMeter:
    return GpuMeter(QUICK, Event, read)


def test_gpu_calls_are_timed_by_events() -> None:
    found = sample({"a": [lambda: time.sleep(0.005)]}, QUICK, meter=meter(lambda: QUIET))
    assert 5 <= min(found.pooled("a")) < 50
    assert found.device == {
        "timed_by": "device events",
        "watched": True,
        "sm_clock_mhz": [1980, 1980],
        "memory_clock_mhz": [3201, 3201],
        "temperature_c": [40, 40],
        "throttled": [],
        "num_rounds_shared": 0,
    }


def test_rounds_on_a_shared_gpu_are_dropped() -> None:
    readings = iter([QUIET, QUIET, replace(QUIET, others=1), QUIET])
    one_by_one = replace(QUICK, block_ms=2000 * TELLING_S)
    found = sample(
        {"a": [lambda: time.sleep(0.002)]}, one_by_one, meter=meter(lambda: next(readings, QUIET))
    )
    assert found.num_dropped == 1
    assert found.stable
    assert found.device is not None
    assert found.device["num_rounds_shared"] == 1


def test_facts_cover_all_rounds() -> None:
    hot = replace(
        QUIET, sm_clock_mhz=1200, temperature_c=88, throttled=("thermal slowdown by hardware",)
    )
    readings = iter([QUIET, hot])
    found = meter(lambda: next(readings, QUIET))
    found.begin()
    found.disturbed()
    facts = found.facts()
    assert (facts["sm_clock_mhz"], facts["temperature_c"]) == ([1200, 1980], [40, 88])
    assert facts["throttled"] == ["thermal slowdown by hardware"]


def test_facts_without_nvml() -> None:
    def fails() -> Reading:
        raise NvmlError("gone")

    found = meter(fails)
    found.begin()
    assert not found.disturbed()
    assert found.facts() == {"timed_by": "device events", "watched": False}
    assert meter(None).facts() == {"timed_by": "device events", "watched": False}


def test_cpu_calls_are_timed_by_the_clock() -> None:
    with meter_of(torch.device("cpu"), QUICK) as found:
        assert isinstance(found, CpuMeter)
        assert not isinstance(found, GpuMeter)
        assert found.timed_ms(lambda: time.sleep(0.002)) >= 2
        assert found.facts() is None
    assert sample({"a": [lambda: None]}, QUICK).device is None


def test_cpu_time_of_other_processes_is_read() -> None:
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        used_s = {pid: usage.used_s for pid, usage in process_times().items()}
    finally:
        hog.kill()
        hog.wait()
    assert used_s[hog.pid] > 0
    assert os.getpid() not in used_s


def test_names_may_contain_parentheses(tmp_path: Path) -> None:
    for pid, name, ticks in ((7, "a (b) c", 200), (8, "idle", 1)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} ({name}) R {'0 ' * 10}{ticks} 0 900 0 20 0"
        )
    used_s = 200 / os.sysconf("SC_CLK_TCK")
    assert most_active({}, process_times(tmp_path), 2 * used_s) == "a (b) c (pid 7) 50% of a CPU"


def test_time_before_a_change_of_name_does_not_count() -> None:
    """The kernel's workers rename themselves, and so does a process that executes another
    program.
    """
    before, now = {32: Usage("kworker/0:1-events", 9.0)}, {32: Usage("kworker/0:1-mm", 9.5)}
    assert most_active(before, now, 1.0) == "kworker/0:1-mm (pid 32) 50% of a CPU"
