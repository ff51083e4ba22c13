"""Meters time calls, and detect whether other processes disturbed the CPU or GPU meanwhile.

On a GPU, device events around a call measure it, including its launches. The meter waits for the
device after every call, so that calls do not overlap.

CPU time can replace the clock only for calls on a single thread: it leaves out what other processes
and the hypervisor took. With more threads it counts OpenMP's spinning at barriers, of which a
disturbed call has up to 400 times as much as computation.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from freezer.codec import Json
from freezer.hardware import NvmlError, num_other_processes, opened
from freezer.runtime.devices import current
from freezer.spec import SamplingPolicy

ONE_THREAD = 0.05
"""CPU time that other threads of this process may use, relative to the one that makes the calls."""


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
        return _Times(*map(operator.sub, self, before))


class CpuMeter:
    """Times calls by the process's clock; other processes on its CPUs disturb."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._first = _cpu_times()
        self._before = self._first
        self._calls_s = 0.0
        self._other_threads_s = 0.0

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
        num_cpus = len(os.sched_getaffinity(0))
        available = max(passed.elapsed * num_cpus, 1e-6)
        used_by_others = passed.busy - passed.own - 0.02
        if used_by_others > self._policy.busy_limit * available:
            return True
        return passed.stolen - 0.01 > self._policy.steal_limit * available

    def single_threaded(self) -> bool:
        """Whether the calls of all rounds used one thread, so that its CPU time is their latency
        without disturbance.
        """
        if torch.get_num_threads() != 1:
            return False
        return self._other_threads_s <= ONE_THREAD * self._calls_s

    def disturbance(self) -> str:
        """The use of the CPUs since this meter was made, beside this process."""
        passed = _cpu_times().since(self._first)
        num_cpus = len(os.sched_getaffinity(0))
        available = passed.elapsed * num_cpus
        others = (passed.busy - passed.own) / available
        stolen = passed.stolen / available
        return (
            f"other processes used {others:.0%} of {num_cpus} CPU(s), the hypervisor {stolen:.0%}"
        )

    def facts(self) -> Json | None:
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
        count_others: counts the other processes on the GPU; None without NVML.
    """

    def __init__(
        self,
        policy: SamplingPolicy,
        new_event: Callable[[], Any],
        count_others: Callable[[], int] | None,
    ) -> None:
        super().__init__(policy)
        self._start = new_event()
        self._end = new_event()
        self._count_others = count_others
        self._shared_at_start = False
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
        self._shared_at_start = self._is_shared()

    def disturbed(self, num_rounds: int = 1) -> bool:
        """Whether another process was on the GPU at the start or end of the rounds, or used the
        CPUs.
        """
        shared = self._is_shared() or self._shared_at_start
        self._num_shared += num_rounds * shared
        return shared or super().disturbed()

    def single_threaded(self) -> bool:
        """False: the device computes."""
        return False

    def disturbance(self) -> str:
        """The use of the GPU and of the CPUs since this meter was made, beside this process."""
        shared = (
            f"others were on the GPU in {self._num_shared} rounds; " if self._num_shared else ""
        )
        return shared + super().disturbance()

    def facts(self) -> Json:
        """How rounds were timed and watched, and the number of shared rounds."""
        return {
            "timed_by": "device events",
            "watched": self._count_others is not None,
            "num_rounds_shared": self._num_shared,
        }

    def _is_shared(self) -> bool:
        """Whether another process is on the GPU now; False without NVML."""
        if self._count_others is None:
            return False
        try:
            return self._count_others() > 0
        except NvmlError:
            self._count_others = None  # facts() then reports "watched": False
            return False


@contextmanager
def meter_of(device: torch.device, policy: SamplingPolicy) -> Iterator[CpuMeter]:
    """The meter of a device; a GPU is the current one within the block."""
    if device.type != "cuda":
        yield CpuMeter(policy)
        return
    count_others = None
    with ExitStack() as stack:
        stack.enter_context(current(device))
        with suppress(NvmlError):
            stack.enter_context(opened())
            uuid = torch.cuda.get_device_properties(device).uuid
            count_others = partial(num_other_processes, f"GPU-{uuid}")
        new_event = partial(torch.cuda.Event, enable_timing=True)
        yield GpuMeter(policy, new_event, count_others)


def _cpu_times() -> _Times:
    tick = os.sysconf("SC_CLK_TCK")
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    stolen = 0
    with open("/proc/stat") as file:
        for line in file:
            name, *fields = line.split()
            if name not in names:
                continue
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return _Times(
        elapsed=time.monotonic(),
        busy=busy / tick,
        stolen=stolen / tick,
        own=time.process_time(),
        thread=time.thread_time(),
    )
