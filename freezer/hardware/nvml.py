"""NVML, the library of the NVIDIA driver: the GPUs of a machine and their present state. Imports no torch and starts no CUDA.

Called through ctypes: `nvidia-ml-py` would be one more dependency of every deployment, or GPUs would go undetected without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"

_TEXT_BYTES = 96
_SM, _MEMORY = 1, 2
_GPU_TEMPERATURE = 0
_INSUFFICIENT_SIZE = 7
_MAX_PROCESSES = 4096

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


class NvmlError(Exception):
    """NVML is missing or failed. Callers turn it into the reason why there is no GPU."""


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
        others: number of other processes that compute on it. In a container NVML lists the host's process ids, where this process
            cannot be found; one listed process then counts as this one.
        sm_clock_mhz, memory_clock_mhz, temperature_c: None if the driver does not report it.
        throttled: what limits its clocks.
    """

    others: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] = ()


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of the functions `_v2` and `_v3`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """The library, open until `close`.

    Raises:
        NvmlError: the library cannot be opened or initialized.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"{library} cannot be opened: {error}") from None
        self._call("nvmlInit_v2")

    def close(self) -> None:
        """Shut the library down."""
        with contextlib.suppress(NvmlError):
            self._call("nvmlShutdown")

    def driver(self) -> str:
        """The driver's version: `550.54.15`."""
        return self._text("nvmlSystemGetDriverVersion")

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of the machine in PCI bus order, regardless of CUDA_VISIBLE_DEVICES."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            uuid, name = self._text("nvmlDeviceGetUUID", handle), self._text("nvmlDeviceGetName", handle)
            found.append(Gpu(uuid, major.value * 10 + minor.value, name))
        return tuple(found)

    def reading(self, uuid: str) -> Reading:
        """The present state of a GPU.

        Raises:
            NvmlError: there is no GPU with this UUID, or its processes cannot be listed.
        """
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        reasons = ctypes.c_ulonglong()
        with contextlib.suppress(NvmlError):
            self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        return Reading(
            others=num_others(self._processes(handle), os.getpid()),
            sm_clock_mhz=self._number("nvmlDeviceGetClockInfo", handle, _SM),
            memory_clock_mhz=self._number("nvmlDeviceGetClockInfo", handle, _MEMORY),
            temperature_c=self._number("nvmlDeviceGetTemperature", handle, _GPU_TEMPERATURE),
            throttled=tuple(text for bit, text in _THROTTLED.items() if reasons.value & bit),
        )

    def _processes(self, handle: ctypes.c_void_p) -> list[int]:
        """Ids of the processes that compute on a GPU."""
        count, room = ctypes.c_uint(0), 32
        while room <= _MAX_PROCESSES:
            listed = (_Process * room)()
            count.value = room
            code = self._code("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), listed)
            if code != _INSUFFICIENT_SIZE:
                self._check("nvmlDeviceGetComputeRunningProcesses_v3", code)
                return [item.pid for item in listed[: count.value]]
            room *= 4
        raise NvmlError(f"more than {_MAX_PROCESSES} processes compute on one GPU")

    def _number(self, function: str, handle: ctypes.c_void_p, kind: int) -> int | None:
        value = ctypes.c_uint()
        try:
            self._call(function, handle, ctypes.c_int(kind), ctypes.byref(value))
        except NvmlError:
            return None
        return value.value

    def _text(self, function: str, *args: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, *args, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *args: object) -> None:
        self._check(function, self._code(function, *args))

    def _code(self, function: str, *args: object) -> int:
        try:
            found = getattr(self._library, function)
        except AttributeError:
            raise NvmlError(f"this driver's NVML has no {function}") from None
        return int(found(*args))

    def _check(self, function: str, code: int) -> None:
        if code == 0:
            return
        text = self._library.nvmlErrorString
        text.restype = ctypes.c_char_p
        raise NvmlError(f"{function}: {(text(code) or b'unknown error').decode(errors='replace')}")


@contextlib.contextmanager
def opened(library: str = LIBRARY) -> Iterator[Nvml]:
    """Open NVML for a block; raises NvmlError if it cannot be opened."""
    nvml = Nvml(library)
    try:
        yield nvml
    finally:
        nvml.close()


def num_others(pids: Sequence[int], own: int) -> int:
    """Count the listed processes other than this one; see Reading.others."""
    return len([pid for pid in pids if pid != own]) if own in pids else max(0, len(pids) - 1)
