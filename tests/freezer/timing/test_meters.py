"""Meters: device events around each call, and detection of other processes on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from freezer.hardware import NvmlError
from freezer.timing import sample
from freezer.timing.meters import GpuMeter
from freezer.timing.sampling import TELLING_S
from tests.support.steps import QUICK


class Event:
    """torch.cuda.Event by the process's clock."""

    def __init__(self) -> None:
        self.at = 0.0
        self.waited = False

    def record(self) -> None:
        self.at = time.perf_counter()
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end_event: Any) -> float:
        assert end_event.waited
        return (float(end_event.at) - self.at) * 1e3


def meter(count_others: Callable[[], int] | None) -> GpuMeter:
    return GpuMeter(QUICK, Event, count_others)


def test_gpu_calls_are_timed_by_events() -> None:
    found = sample({"a": [lambda: time.sleep(0.005)]}, QUICK, meter=meter(lambda: 0))
    assert 5 <= min(found.pooled("a")) < 50
    assert found.device == {
        "timed_by": "device events",
        "watched": True,
        "num_rounds_shared": 0,
    }


def test_rounds_on_a_shared_gpu_are_dropped() -> None:
    readings = iter([0, 0, 1, 0])
    one_by_one = replace(QUICK, block_ms=2000 * TELLING_S)
    found = sample(
        {"a": [lambda: time.sleep(0.002)]}, one_by_one, meter=meter(lambda: next(readings, 0))
    )
    assert found.num_dropped == 1
    assert found.stable
    assert found.device is not None
    assert found.device["num_rounds_shared"] == 1


def test_facts_without_nvml() -> None:
    def fails() -> int:
        raise NvmlError("gone")

    found = meter(fails)
    found.begin()
    assert not found.disturbed()
    assert not found.facts()["watched"]
    assert not meter(None).facts()["watched"]
