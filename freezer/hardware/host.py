"""What this machine's processor and GPUs are, found without torch and without starting CUDA."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import archspec.cpu.detect

from freezer.hardware import nvml

_PR_SVE_GET_VL = 51
_SVE_VL_LEN_MASK = 0xFFFF
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {
    **{0: "fp", 1: "asimd", 7: "crc32", 8: "atomics", 9: "fphp", 10: "asimdhp", 12: "asimdrdm", 13: "jscvt", 14: "fcma"},
    **{15: "lrcpc", 20: "asimddp", 22: "sve", 23: "asimdfhm", 26: "ilrcpc", 27: "flagm", 29: "sb"},
}
_HWCAP2 = {1: "sve2", 7: "flagm2", 8: "frint", 9: "svei8mm", 12: "svebf16", 13: "i8mm", 14: "bf16"}
"""Bits of the kernel's auxiliary vector, by archspec's names: those that a device class asks for (arch/arm64 uapi hwcap.h)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its UUID as NVML gives it, its compute capability, major * 10 + minor, and its name."""

    uuid: str
    capability: int
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine, as far as device classes go by it.

    Attributes:
        machine: `x86_64` or `aarch64`, as `uname -m` says it.
        vendor: of the CPU, as CPUID gives it; empty on Arm.
        features: by archspec's names; what the CPU has and the kernel lets processes use.
        sve_bits: the length of SVE's vectors; None without SVE.
        gpus: in NVML's order, which is that of the PCI bus.
        no_gpu: why there is no GPU, or why it cannot be told.
        driver: version of the NVIDIA driver; None where there is none.
    """

    machine: str
    vendor: str = ""
    features: frozenset[str] = frozenset()
    sve_bits: int | None = None
    gpus: tuple[Gpu, ...] = ()
    no_gpu: str = "no NVIDIA driver"
    driver: str | None = None


@functools.cache
def this_host() -> Host:
    """The machine that this process runs on."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    gpus, no_gpu, driver = _gpus()
    if machine == "x86_64":
        vendor, features = _x86()
        return Host(machine=machine, vendor=vendor, features=features, gpus=gpus, no_gpu=no_gpu, driver=driver)
    features = _arm() if machine == "aarch64" else frozenset()
    return Host(
        machine=machine,
        features=features,
        sve_bits=_sve_bits() if "sve" in features else None,
        gpus=gpus,
        no_gpu=no_gpu,
        driver=driver,
    )


def _x86() -> tuple[str, frozenset[str]]:
    """Vendor, and what CPUID reports and the kernel lets processes use: /proc/cpuinfo alone shows an emulator's host."""
    cpuid = archspec.cpu.detect.CpuidInfoCollector()
    features = set(cpuid.features)
    if "pni" in features:  # archspec's CPUID table knows SSE3 by its first name only
        features.add("sse3")
    return cpuid.vendor, frozenset(features & set(archspec.cpu.detect.proc_cpuinfo().features))


def _arm() -> frozenset[str]:
    """What the kernel tells this process in its auxiliary vector, which an emulator fills in too."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return _named(getauxval(_AT_HWCAP), _HWCAP) | _named(getauxval(_AT_HWCAP2), _HWCAP2)


def _named(bits: int, names: Mapping[int, str]) -> frozenset[str]:
    return frozenset(name for bit, name in names.items() if bits >> bit & 1)


def _sve_bits() -> int | None:
    length = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return (length & _SVE_VL_LEN_MASK) * 8 if length > 0 else None


def _gpus() -> tuple[tuple[Gpu, ...], str, str | None]:
    """The GPUs that NVML shows, why there are none, and the driver's version."""
    try:
        with nvml.opened() as library:
            found = tuple(Gpu(item.uuid, item.capability, item.name) for item in library.gpus())
            return found, "" if found else "NVML shows no GPU", library.driver()
    except nvml.NvmlError as error:
        if not Path("/dev/nvidiactl").exists():
            return (), "no NVIDIA driver", None
        return (
            (),
            f"an NVIDIA driver is here, but NVML: {error} (a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
            None,
        )
