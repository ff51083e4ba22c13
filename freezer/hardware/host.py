"""The processor and GPUs of this machine, detected without torch and without starting CUDA."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import archspec.cpu.detect

from freezer.hardware import nvml
from freezer.hardware.nvml import Gpu

_PR_SVE_GET_VL = 51
_SVE_VL_LEN_MASK = 0xFFFF
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {
    **{0: "fp", 1: "asimd", 7: "crc32", 8: "atomics", 9: "fphp", 10: "asimdhp", 12: "asimdrdm", 13: "jscvt", 14: "fcma"},
    **{15: "lrcpc", 20: "asimddp", 22: "sve", 23: "asimdfhm", 26: "ilrcpc", 27: "flagm", 29: "sb"},
}
_HWCAP2 = {1: "sve2", 7: "flagm2", 8: "frint", 9: "svei8mm", 12: "svebf16", 13: "i8mm", 14: "bf16"}
"""Bits of the kernel's auxiliary vector that device classes need, with archspec's names (arch/arm64 uapi hwcap.h)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The properties of a machine that device classes depend on.

    Attributes:
        machine: `x86_64` or `aarch64`, as in `uname -m`.
        vendor: of the CPU, from CPUID; empty on Arm.
        features: archspec's names of what the CPU has and the kernel enables.
        sve_bits: vector length of SVE; None without SVE.
        gpus: in PCI bus order.
        no_gpu: why no GPU was detected.
        driver: version of the NVIDIA driver.
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
    vendor, features = "", frozenset[str]()
    if machine == "x86_64":
        vendor, features = _x86()
    elif machine == "aarch64":
        features = _arm()
    return Host(
        machine=machine,
        vendor=vendor,
        features=features,
        sve_bits=_sve_bits() if "sve" in features else None,
        gpus=gpus,
        no_gpu=no_gpu,
        driver=driver,
    )


def _x86() -> tuple[str, frozenset[str]]:
    """Vendor and features from CPUID that the kernel enables; /proc/cpuinfo alone shows the host of an emulator."""
    cpuid = archspec.cpu.detect.CpuidInfoCollector()
    features = set(cpuid.features)
    if "pni" in features:  # the first name of SSE3, the only one in archspec's CPUID table
        features.add("sse3")
    return cpuid.vendor, frozenset(features & set(archspec.cpu.detect.proc_cpuinfo().features))


def _arm() -> frozenset[str]:
    """Features from the kernel's auxiliary vector, which emulators fill in too."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return _named(getauxval(_AT_HWCAP), _HWCAP) | _named(getauxval(_AT_HWCAP2), _HWCAP2)


def _named(bits: int, names: Mapping[int, str]) -> frozenset[str]:
    return frozenset(name for bit, name in names.items() if bits >> bit & 1)


def _sve_bits() -> int | None:
    length = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return (length & _SVE_VL_LEN_MASK) * 8 if length > 0 else None


def _gpus() -> tuple[tuple[Gpu, ...], str, str | None]:
    """The GPUs, the reason if there are none, and the driver's version."""
    try:
        with nvml.opened() as library:
            found = library.gpus()
            return found, "" if found else "NVML shows no GPU", library.driver()
    except nvml.NvmlError as error:
        if not Path("/dev/nvidiactl").exists():
            return (), "no NVIDIA driver", None
        hint = "a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return (), f"an NVIDIA driver is here, but NVML: {error} ({hint})", None
