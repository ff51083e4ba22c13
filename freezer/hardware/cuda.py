"""CUDA in a process, and what an artifact for a GPU needs of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freezer.hardware.device_classes import DeviceClass

_LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Linux drivers by CUDA's major version: NVIDIA's "CUDA Compatibility", minor version
compatibility.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
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
    if made_for.kind != "cuda" or made_for.capability is None:
        return None
    return CudaNeeds(
        capability=f"{made_for.capability // 10}.{made_for.capability % 10}",
        runtime=runtime,
        driver=least_driver(runtime),
        host=made_for.host,
    )


def least_driver(runtime: str | None) -> str | None:
    """The oldest driver for programs of a CUDA version; None if unknown."""
    return _LEAST_DRIVER.get(cuda_version(runtime)[0]) if runtime else None


def cuda_version(text: str | None) -> tuple[int, ...]:
    """The numbers of a version; empty for None."""
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())
