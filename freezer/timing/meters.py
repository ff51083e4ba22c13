"""Meters: what times a call, and tells whether others disturbed the hardware meanwhile; one of a CPU and one of a GPU.

On a GPU, events of the device around the call say how long it took: from when the device was free until it had done all of it, of
which the call's own launching is part. The device is waited for after every call, so that no call is hidden behind another.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from freezer.hardware.nvml import Nvml, NvmlError, Reading
from freezer.limits import SamplingPolicy
from freezer.runtime.cuda import current, nvml_uuid


class Meter(Protocol):
    """Times calls on one piece of hardware."""

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """What a call takes, in milliseconds."""

    def begin(self) -> None:
        """One round, or several short ones, begin."""

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether others used the hardware in these rounds, more than the policy allows."""

    def facts(self) -> dict[str, Any] | None:
        """What was seen of the hardware over all rounds, for the manifest; None where there is nothing to tell."""


class CpuMeter:
    """Times calls by the clock of the process; others that use its CPUs disturb."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._before = _CpuTimes.read()

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """What a call takes, in milliseconds."""
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / 1e6

    def begin(self) -> None:
        """A round begins."""
        self._before = _CpuTimes.read()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether others used the CPUs."""
        return _CpuTimes.read().disturbed_since(self._before, self._policy)

    def facts(self) -> dict[str, Any] | None:
        """The judge records what there is to tell of a CPU."""
        return None


class DeviceEvent(Protocol):
    """A mark in a device's stream of work: torch.cuda.Event with timing."""

    def record(self) -> None:
        """Mark what was given to the device until now."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this mark to a later one."""


class GpuMeter(CpuMeter):
    """Times calls by events of a GPU; others that compute on it disturb, and those that use the CPUs, which launch its kernels.

    Args:
        policy: of the sampling.
        new_event: an event of the GPU.
        read: how the GPU is doing; None where NVML does not tell it.
    """

    def __init__(self, policy: SamplingPolicy, new_event: Callable[[], DeviceEvent], read: Callable[[], Reading] | None) -> None:
        super().__init__(policy)
        self._start, self._end, self._read = new_event(), new_event(), read
        self._readings: list[Reading] = []
        self._num_shared = 0

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """What a call takes on the device, in milliseconds."""
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def begin(self) -> None:
        """A round begins."""
        super().begin()
        self._note()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether another process was on the GPU when the round began or ended, or others used the CPUs."""
        self._note()
        shared = any(reading.others for reading in self._readings[-2:])
        self._num_shared += num_rounds * shared
        return shared or super().disturbed()

    def facts(self) -> dict[str, Any]:
        """Clocks, temperatures and what throttled, from the least to the most seen; and the rounds that others disturbed."""
        if self._read is None:
            return {"timed_by": "device events", "watched": False}
        throttled = dict.fromkeys(text for reading in self._readings for text in reading.throttled)
        return {
            "timed_by": "device events",
            "watched": True,
            "sm_clock_mhz": _range(reading.sm_clock_mhz for reading in self._readings),
            "memory_clock_mhz": _range(reading.memory_clock_mhz for reading in self._readings),
            "temperature_c": _range(reading.temperature_c for reading in self._readings),
            "throttled": list(throttled),
            "num_rounds_shared": self._num_shared,
        }

    def _note(self) -> None:
        if self._read is None:
            return
        try:
            self._readings.append(self._read())
        except NvmlError:
            self._read = None  # what was seen until then is no answer: the facts say that it was not watched


@contextlib.contextmanager
def meter_of(device: torch.device, policy: SamplingPolicy) -> Iterator[Meter]:
    """The meter of a device, for the time of a block, in which a GPU is the current one."""
    if device.type != "cuda":
        yield CpuMeter(policy)
        return
    nvml, uuid = _opened(), nvml_uuid(device)
    try:
        with current(device):
            read = None if nvml is None or uuid is None else _reader(nvml, uuid)
            yield GpuMeter(policy, lambda: torch.cuda.Event(enable_timing=True), read)
    finally:
        if nvml is not None:
            nvml.close()


def _opened() -> Nvml | None:
    try:
        return Nvml()
    except NvmlError:
        return None


def _reader(nvml: Nvml, uuid: str) -> Callable[[], Reading]:
    return lambda: nvml.reading(uuid)


def _range(values: Any) -> list[int] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _CpuTimes:
    """CPU seconds since boot of the CPUs that this process may use: by anyone, stolen by the hypervisor, and of this process."""

    at: float
    num_cpus: int
    busy_s: float
    steal_s: float
    own_s: float

    @classmethod
    def read(cls) -> _CpuTimes:
        tick, cpus = os.sysconf("SC_CLK_TCK"), os.sched_getaffinity(0)
        busy = steal = 0
        with open("/proc/stat") as file:
            for line in file:
                name, *fields = line.split()
                if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
                    user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(field) for field in fields[:8])
                    busy += user + nice + system + irq + softirq
                    steal += stolen
        return cls(at=time.monotonic(), num_cpus=len(cpus), busy_s=busy / tick, steal_s=steal / tick, own_s=time.process_time())

    def disturbed_since(self, before: _CpuTimes, policy: SamplingPolicy) -> bool:
        """Whether others used more of the CPUs since `before` than the policy allows; two clock ticks are forgiven."""
        available = max((self.at - before.at) * self.num_cpus, 1e-6)
        others = (self.busy_s - before.busy_s) - (self.own_s - before.own_s) - 0.02
        stolen = self.steal_s - before.steal_s - 0.01
        return others > policy.busy_limit * available or stolen > policy.steal_limit * available
