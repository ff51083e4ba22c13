"""Meters time calls, and detect whether other processes disturbed the CPU or GPU meanwhile.

On a GPU, device events around a call measure it, including its launches. The meter waits for the device after every call, so that
calls do not overlap.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from freezer.hardware.nvml import NvmlError, Reading, opened, reading
from freezer.limits import SamplingPolicy
from freezer.runtime.devices import current, nvml_uuid


class Meter(Protocol):
    """Times calls on one piece of hardware."""

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """Time a call, in milliseconds."""

    def begin(self) -> None:
        """Begin one round, or several short ones."""

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether other processes used the hardware in these rounds more than the policy allows."""

    def facts(self) -> dict[str, Any] | None:
        """State of the hardware over all rounds, for the manifest; None without such."""


class CpuMeter:
    """Times calls by the process's clock; other processes on its CPUs disturb."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._before = _CpuTimes.read()

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """Time a call, in milliseconds."""
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / 1e6

    def begin(self) -> None:
        """Begin a round."""
        self._before = _CpuTimes.read()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether other processes used the CPUs."""
        return _CpuTimes.read().disturbed_since(self._before, self._policy)

    def facts(self) -> dict[str, Any] | None:
        """None: the judge records the CPU."""
        return None


class DeviceEvent(Protocol):
    """Interface of torch.cuda.Event with timing."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def synchronize(self) -> None:
        """Wait until the device reaches the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one."""


class GpuMeter(CpuMeter):
    """Times calls by events of a GPU; other processes on it, or on the CPUs that launch its kernels, disturb.

    Args:
        policy: of the sampling.
        new_event: makes an event of the GPU.
        read: reads the state of the GPU; None without NVML.
    """

    def __init__(self, policy: SamplingPolicy, new_event: Callable[[], DeviceEvent], read: Callable[[], Reading] | None) -> None:
        super().__init__(policy)
        self._start, self._end, self._read = new_event(), new_event(), read
        self._readings: list[Reading] = []
        self._num_shared = 0

    def timed_ms(self, call: Callable[[], Any]) -> float:
        """Time a call on the device, in milliseconds."""
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def begin(self) -> None:
        """Begin a round."""
        super().begin()
        self._note()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether another process was on the GPU at the start or end of the round, or used the CPUs."""
        self._note()
        shared = any(reading.others for reading in self._readings[-2:])
        self._num_shared += num_rounds * shared
        return shared or super().disturbed()

    def facts(self) -> dict[str, Any]:
        """Ranges of clocks and temperatures, throttling reasons, and the number of shared rounds."""
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
            self._read = None  # facts() then reports "watched": False


@contextlib.contextmanager
def meter_of(device: torch.device, policy: SamplingPolicy) -> Iterator[Meter]:
    """The meter of a device; a GPU is the current one within the block."""
    if device.type != "cuda":
        yield CpuMeter(policy)
        return
    read = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(current(device))
        with contextlib.suppress(NvmlError):
            stack.enter_context(opened())
            read = partial(reading, nvml_uuid(device))
        yield GpuMeter(policy, lambda: torch.cuda.Event(enable_timing=True), read)


def _range(values: Any) -> list[int] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _CpuTimes:
    """CPU seconds since boot of the CPUs that this process may use: busy, stolen by the hypervisor, and of this process."""

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
        """Whether others used more of the CPUs since `before` than the policy allows; two clock ticks are ignored."""
        available = max((self.at - before.at) * self.num_cpus, 1e-6)
        others = (self.busy_s - before.busy_s) - (self.own_s - before.own_s) - 0.02
        stolen = self.steal_s - before.steal_s - 0.01
        return others > policy.busy_limit * available or stolen > policy.steal_limit * available
