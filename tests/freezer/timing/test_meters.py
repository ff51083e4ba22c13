"""Meters: events of a device around each call, and what of the device disturbs a round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from freezer.hardware.nvml import NvmlError, Reading
from freezer.timing.meters import CpuMeter, GpuMeter, meter_of
from freezer.timing.sampling import TELLING_S, sample
from tests.steps import QUICK

QUIET = Reading(others=0, sm_clock_mhz=1980, memory_clock_mhz=3201, temperature_c=40)


class Event:
    """What torch.cuda.Event is to a meter, by the clock of the process."""

    def __init__(self) -> None:
        self.at = 0.0
        self.waited = False

    def record(self) -> None:
        self.at, self.waited = time.perf_counter(), False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end_event: Any) -> float:
        assert end_event.waited, "an event that was not waited for tells nothing"
        return (float(end_event.at) - self.at) * 1e3


def meter(read: Callable[[], Reading] | None) -> GpuMeter:
    return GpuMeter(QUICK, Event, read)


def test_a_call_takes_what_lies_between_its_events() -> None:
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


def test_rounds_in_which_another_process_is_on_the_gpu_are_dropped_and_counted() -> None:
    readings = iter([QUIET, QUIET, replace(QUIET, others=1), QUIET])
    one_by_one = replace(QUICK, block_ms=2000 * TELLING_S)
    found = sample({"a": [lambda: time.sleep(0.002)]}, one_by_one, meter=meter(lambda: next(readings, QUIET)))
    assert found.num_dropped == 1
    assert found.stable
    assert found.device is not None
    assert found.device["num_rounds_shared"] == 1


def test_a_gpu_that_is_shared_all_the_time_tells_nothing() -> None:
    found = sample({"a": [lambda: time.sleep(0.01)]}, QUICK, meter=meter(lambda: replace(QUIET, others=2)))
    assert not found.stable
    assert found.num_dropped > 0
    assert found.samples_ms["a"] == []


def test_clocks_temperatures_and_what_throttles_are_told_over_all_rounds() -> None:
    hot = replace(QUIET, sm_clock_mhz=1200, temperature_c=88, throttled=("thermal slowdown by hardware",))
    readings = iter([QUIET, hot])
    found = meter(lambda: next(readings, QUIET))
    found.begin()
    found.disturbed()
    facts = found.facts()
    assert (facts["sm_clock_mhz"], facts["temperature_c"]) == ([1200, 1980], [40, 88])
    assert facts["throttled"] == ["thermal slowdown by hardware"]


def test_where_nvml_does_not_answer_that_is_told() -> None:
    def fails() -> Reading:
        raise NvmlError("gone")

    found = meter(fails)
    found.begin()
    assert not found.disturbed()
    assert found.facts() == {"timed_by": "device events", "watched": False}
    assert meter(None).facts() == {"timed_by": "device events", "watched": False}


def test_a_cpu_has_the_clock_of_the_process() -> None:
    with meter_of(torch.device("cpu"), QUICK) as found:
        assert isinstance(found, CpuMeter)
        assert not isinstance(found, GpuMeter)
        assert found.timed_ms(lambda: time.sleep(0.002)) >= 2
        assert found.facts() is None
    assert sample({"a": [lambda: None]}, QUICK).device is None


@pytest.mark.parametrize("others", [0, 1])
def test_a_disturbed_gpu_is_told_of_even_where_the_cpus_are_quiet(others: int) -> None:
    found = meter(lambda: replace(QUIET, others=others))
    found.begin()
    assert found.disturbed() == bool(others)
