"""NVML, the library of the NVIDIA driver: the GPUs of a machine and their present state.

Imports no torch and starts no CUDA; pynvml, whose import is slow, is imported on use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


class NvmlError(Exception):
    """NVML is missing or failed. Callers report it as the reason that GPUs are unusable."""


_THROTTLED = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of nvmlClocksEventReasons (nvml.h) that limit clocks; 0x1 is an idle GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its UUID in NVML, its compute capability (major * 10 + minor), and its name."""

    uuid: str
    capability: int
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """State of a GPU at one moment.

    Attributes:
        others: number of other processes that compute on it. In a container NVML lists the host's
            process ids, where this process cannot be found; one listed process then counts as this
            one.
        sm_clock_mhz, memory_clock_mhz, temperature_c: None if the driver does not report it.
        throttled: what limits its clocks.
    """

    others: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] = ()


@contextlib.contextmanager
def _converting() -> Iterator[None]:
    """Convert errors of NVML to NvmlError."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Open NVML for a block; raises NvmlError if it cannot be opened."""
    import pynvml

    with _converting():
        pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


@_converting()
def driver_version() -> str:
    """The version of the driver."""
    import pynvml

    return str(pynvml.nvmlSystemGetDriverVersion())


@_converting()
def gpus() -> tuple[Gpu, ...]:
    """All GPUs of the machine in PCI bus order, regardless of CUDA_VISIBLE_DEVICES."""
    import pynvml

    listed = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        listed.append(Gpu(uuid, major * 10 + minor, name))
    return tuple(listed)


@_converting()
def reading(uuid: str) -> Reading:
    """The present state of a GPU.

    Raises:
        NvmlError: there is no GPU with this UUID, or its processes cannot be listed.
    """
    import pynvml as nvml

    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    reasons = _reported(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return Reading(
        others=num_others([process.pid for process in processes], os.getpid()),
        sm_clock_mhz=_reported(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=_reported(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        temperature_c=_reported(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        throttled=tuple(text for bit, text in _THROTTLED.items() if reasons & bit),
    )


def _reported(function: Callable[..., int], *args: object) -> int | None:
    """The result of a function of NVML; None if the driver does not report it."""
    try:
        with _converting():
            return function(*args)
    except NvmlError:
        return None


def num_others(pids: Sequence[int], own: int) -> int:
    """Count the listed processes other than this one; see Reading.others."""
    return len([pid for pid in pids if pid != own]) if own in pids else max(0, len(pids) - 1)
