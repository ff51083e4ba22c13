"""Meters time calls, and detect whether other processes disturbed the CPU or GPU meanwhile.

On a GPU, device events around a call measure it, including its launches. The meter waits for the
device after every call, so that calls do not overlap.

A disturbed meter names the processes that used the CPUs most, by two readings of /proc: those that
ended in between and those of other containers are not visible.

CPU time can replace the clock only for calls on a single thread: it leaves out what other processes
and the hypervisor took. With more threads it counts OpenMP's spinning at barriers, of which a
disturbed call has up to 400 times as much as computation.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from freezer.hardware import NvmlError, Reading, opened, reading
from freezer.runtime.devices import current, nvml_uuid
from freezer.spec import SamplingPolicy

ONE_THREAD = 0.05
"""CPU time that other threads of this process may use, relative to the one that makes the calls."""

MAX_NAMED = 3
"""Processes to name."""

_LEAST_SHARE = 0.05
"""Share of a CPU below which a process is not named."""


class _Times(NamedTuple):
    """Seconds by the clock, of the CPUs of this process while busy, of them stolen by the
    hypervisor, used by this process, and used by this thread.
    """

    elapsed: float
    busy: float
    stolen: float
    own: float
    thread: float

    def since(self, before: _Times) -> _Times:
        """The time that passed, of each kind."""
        return _Times(*(now - then for now, then in zip(self, before, strict=True)))


class CpuMeter:
    """Times calls by the process's clock; other processes on its CPUs disturb."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._first = self._before = _cpu_times()
        self._processes = process_times()
        self._calls_s = self._other_threads_s = 0.0

    def timed_ms(self, call: Callable[[], object]) -> float:
        """Time a call, in milliseconds."""
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / 1e6

    def begin(self) -> None:
        """Begin one round, or several short ones."""
        self._before = _cpu_times()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether other processes used the hardware in these rounds more than the policy allows;
        two clock ticks are ignored.
        """
        passed = _cpu_times().since(self._before)
        self._calls_s += passed.thread
        self._other_threads_s += passed.own - passed.thread
        available = max(passed.elapsed * len(os.sched_getaffinity(0)), 1e-6)
        by_others = passed.busy - passed.own - 0.02 > self._policy.busy_limit * available
        return by_others or passed.stolen - 0.01 > self._policy.steal_limit * available

    def single_threaded(self) -> bool:
        """Whether the calls of all rounds used one thread, so that its CPU time is their latency
        without disturbance.
        """
        return torch.get_num_threads() == 1 and self._other_threads_s <= ONE_THREAD * self._calls_s

    def disturbance(self) -> str:
        """The use of the CPUs since this meter was made, beside this process."""
        passed, num_cpus = _cpu_times().since(self._first), len(os.sched_getaffinity(0))
        percent = 100 / (passed.elapsed * num_cpus)
        others, stolen = percent * (passed.busy - passed.own), percent * passed.stolen
        active = most_active(self._processes, process_times(), passed.elapsed)
        cpus = "1 CPU" if num_cpus == 1 else f"{num_cpus} CPUs"
        return (
            f"other processes used {others:.0f}% of {cpus}, the hypervisor {stolen:.0f}%; most"
            f" active: {active or 'none that is visible here'}"
        )

    def facts(self) -> dict[str, Any] | None:
        """State of the hardware over all rounds, for the manifest; None for a CPU, which the judge
        records.
        """
        return None


class GpuMeter(CpuMeter):
    """Times calls by events of a GPU; other processes on it, or on the CPUs that launch its
    kernels, disturb.

    Args:
        policy: of the sampling.
        new_event: makes an event like torch.cuda.Event, with timing.
        read: reads the state of the GPU; None without NVML.
    """

    def __init__(
        self,
        policy: SamplingPolicy,
        new_event: Callable[[], Any],
        read: Callable[[], Reading] | None,
    ) -> None:
        super().__init__(policy)
        self._start, self._end, self._read = new_event(), new_event(), read
        self._readings: list[Reading] = []
        self._num_shared = 0

    def timed_ms(self, call: Callable[[], object]) -> float:
        """Time a call on the device, in milliseconds."""
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))

    def begin(self) -> None:
        """Begin one round, or several short ones."""
        super().begin()
        self._note()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether another process was on the GPU at the start or end of the rounds, or used the
        CPUs.
        """
        self._note()
        shared = any(reading.others for reading in self._readings[-2:])
        self._num_shared += num_rounds * shared
        return shared or super().disturbed()

    def single_threaded(self) -> bool:
        """False: the device computes."""
        return False

    def facts(self) -> dict[str, Any]:
        """Ranges of clocks and temperatures, throttling reasons, and the number of shared
        rounds.
        """
        if self._read is None:
            return {"timed_by": "device events", "watched": False}
        ranges: dict[str, list[int] | None] = {}
        for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c"):
            values = [getattr(reading, name) for reading in self._readings]
            known = [value for value in values if value is not None]
            ranges[name] = [min(known), max(known)] if known else None
        throttled = dict.fromkeys(text for reading in self._readings for text in reading.throttled)
        return {
            "timed_by": "device events",
            "watched": True,
            **ranges,
            "throttled": list(throttled),
            "num_rounds_shared": self._num_shared,
        }

    def _note(self) -> None:
        if self._read is not None:
            try:
                self._readings.append(self._read())
            except NvmlError:
                self._read = None  # facts() then reports "watched": False


@contextlib.contextmanager
def meter_of(device: torch.device, policy: SamplingPolicy) -> Iterator[CpuMeter]:
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


def _cpu_times() -> _Times:
    tick, cpus = os.sysconf("SC_CLK_TCK"), os.sched_getaffinity(0)
    busy = steal = 0
    with open("/proc/stat") as file:
        for line in file:
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
                user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, fields[:8])
                busy += user + nice + system + irq + softirq
                steal += stolen
    return _Times(
        time.monotonic(), busy / tick, steal / tick, time.process_time(), time.thread_time()
    )


class Usage(NamedTuple):
    """Name and CPU seconds of a process."""

    name: str
    used_s: float


def process_times(proc: Path = Path("/proc")) -> dict[int, Usage]:
    """CPU time of every visible process but this one, by pid; without that of ended children, which
    a process gets at once for all their life.
    """
    tick, usages = os.sysconf("SC_CLK_TCK"), {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # it ended
            continue
        start, _, rest = text.rpartition(")")  # a name may contain spaces and parentheses
        pid, _, name = start.partition(" (")
        if int(pid) != os.getpid():
            user, system = rest.split()[11:13]  # proc(5)
            usages[int(pid)] = Usage(name, (int(user) + int(system)) / tick)
    return usages


def most_active(before: Mapping[int, Usage], now: Mapping[int, Usage], elapsed_s: float) -> str:
    """The processes that used the CPU most between two readings: `cc1plus (pid 12) 98% of a CPU,
    ...`; empty if none did.
    """
    shares: dict[int, float] = {}
    for pid, usage in now.items():
        used_before_s = before[pid].used_s if pid in before else 0.0
        share = (usage.used_s - used_before_s) / elapsed_s
        if share >= _LEAST_SHARE:
            shares[pid] = share
    first = sorted(shares, key=lambda pid: -shares[pid])[:MAX_NAMED]
    return ", ".join(f"{now[pid].name} (pid {pid}) {shares[pid]:.0%} of a CPU" for pid in first)
