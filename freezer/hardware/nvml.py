"""NVML, the library of the NVIDIA driver: the GPUs of a machine and the processes on them.

Imports no torch and starts no CUDA; pynvml, whose import is slow, is imported on use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class NvmlError(Exception):
    """NVML is missing or failed. Callers report it as the reason that GPUs are unusable."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its UUID in NVML, its compute capability (major * 10 + minor), and its name."""

    uuid: str
    capability: int
    name: str = ""


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
def num_other_processes(uuid: str) -> int:
    """Number of other processes that compute on a GPU.

    Raises:
        NvmlError: there is no GPU with this UUID, or its processes cannot be listed.
    """
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return num_others([process.pid for process in processes], os.getpid())


def num_others(pids: Sequence[int], own: int) -> int:
    """Count the listed processes other than this one; in a container NVML lists the
    host's process ids, where this process cannot be found; one of them then counts as this one.
    """
    return len([pid for pid in pids if pid != own]) if own in pids else max(0, len(pids) - 1)
