"""NVIDIA GPUs: CUDA in a process, what an artifact needs of it, and NVML, the driver's library.

Imports no torch and starts no CUDA; pynvml, whose import is slow, is imported on use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from freezer.codec import frozen
from freezer.hardware.device_classes import DeviceClass

_LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Linux drivers by CUDA's major version: NVIDIA's "CUDA Compatibility", minor version
compatibility.
"""


@frozen
class CudaHere:
    """CUDA in this process.

    Attributes:
        devices: torch's name and compute capability (major * 10 + minor) of each usable GPU.
        runtime: CUDA version of torch; None without CUDA.
        driver: version of the driver; None if unknown.
        why_not: why torch cannot use a GPU; empty if it can.
    """

    devices: tuple[tuple[str, int], ...] = ()
    runtime: str | None = None
    driver: str | None = None
    why_not: str = ""


@frozen
class CudaNeeds:
    """Requirements of an artifact for a GPU: the manifest's `needs.cuda`.

    Attributes:
        capability: exactly the class's own, since kernels are compiled for one.
        runtime: for compiled kernels, at least the CUDA that compiled them, which is torch's.
        driver: at least the one that the major version of that CUDA needs.
        host: CPU class of the code that launches the kernels.
    """

    capability: str
    runtime: str | None
    driver: str | None
    host: str | None


def cuda_needs(made_for: DeviceClass, runtime: str | None) -> CudaNeeds | None:
    """Requirements of an artifact for a GPU; None for any other class.

    Args:
        made_for: its class.
        runtime: the CUDA version that made it: `12.8`.
    """
    if made_for.capability is None:
        return None
    return CudaNeeds(
        capability=f"{made_for.capability // 10}.{made_for.capability % 10}",
        runtime=runtime,
        driver=_LEAST_DRIVER.get(cuda_version(runtime)[0]) if runtime else None,
        host=made_for.host,
    )


def cuda_version(text: str | None) -> tuple[int, ...]:
    """The numbers of a version; empty for None."""
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())


class NvmlError(Exception):
    """NVML is missing or failed. Callers report it as the reason that GPUs are unusable."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its UUID in NVML, and its compute capability (major * 10 + minor)."""

    uuid: str
    capability: int


@contextmanager
def _converting() -> Iterator[None]:
    """Convert errors of NVML to NvmlError."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from error


@contextmanager
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
        listed.append(Gpu(pynvml.nvmlDeviceGetUUID(handle), major * 10 + minor))
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
