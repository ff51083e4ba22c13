"""Device classes: families of hardware that one artifact serves. Imports no torch.

An artifact made for class `a` can run on a machine of class `m` when `can_run(a, m)`: CPU classes follow archspec's order of
microarchitectures, a CUDA class runs on exactly its compute capability, and `portable` runs anywhere.

Running is not enough. Frozen weights are laid out for the instruction set that oneDNN chose when they were packed, and a
lesser class's layout on a better CPU is 10 to 30 times slower unless oneDNN is limited to that class before its first operation
in the process. `limits_hold` says whether it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import archspec.cpu
import archspec.cpu.detect

from freezer.errors import UsageError

PORTABLE = "portable"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClass:
    """A family of hardware, and how a build targets it.

    Attributes:
        name: as used everywhere: `cpu-x86-64-v4`, `cuda-sm90`, `portable`.
        kind: the device that a payload of this class runs on; a portable one runs on a CPU.
        archspec: archspec's name of the least CPU of the class, with which features and order are looked up.
        march: the compiler's target.
        simdlen: width of Inductor's vectors in bits.
        limits: environment that makes oneDNN, ATen and MKL choose what a CPU of just this class would choose; it counts only
            when set before torch is imported.
        capability: of a CUDA class, major * 10 + minor.
    """

    name: str
    kind: Literal["cpu", "cuda", "portable"]
    archspec: str | None = None
    march: str | None = None
    simdlen: int | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    capability: int | None = None


def _cuda(capability: int) -> DeviceClass:
    return DeviceClass(name=f"cuda-sm{capability}", kind="cuda", capability=capability)


DEVICE_CLASSES: Mapping[str, DeviceClass] = {
    PORTABLE: DeviceClass(name=PORTABLE, kind="portable"),
    "cpu-x86-64-v3": DeviceClass(
        name="cpu-x86-64-v3",
        kind="cpu",
        archspec="x86_64_v3",
        march="x86-64-v3",
        simdlen=256,
        limits={"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    "cpu-x86-64-v4": DeviceClass(
        name="cpu-x86-64-v4",
        kind="cpu",
        archspec="x86_64_v4",
        march="x86-64-v4",
        simdlen=512,
        limits={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    ),
    "cuda-sm75": _cuda(75),
    "cuda-sm80": _cuda(80),
    "cuda-sm86": _cuda(86),
    "cuda-sm89": _cuda(89),
    "cuda-sm90": _cuda(90),
    "cuda-sm100": _cuda(100),
}

_LEVELS = ("cpu-x86-64-v3", "cpu-x86-64-v4")
"""The classes that `auto` chooses from, least first."""


def device_class(name: str) -> DeviceClass:
    """The device class of that name.

    Raises:
        UsageError: no class has the name.
    """
    try:
        return DEVICE_CLASSES[name]
    except KeyError:
        raise UsageError(
            f"unknown device class {name!r}; expected one of {', '.join(DEVICE_CLASSES)}", code="CP-DEVICE-CLASS"
        ) from None


def can_run(artifact: str, machine: str) -> bool:
    """Whether what was made for class `artifact` runs on a machine of class `machine`: a partial order."""
    made, host = device_class(artifact), device_class(machine)
    if made.name == host.name or made.kind == "portable":
        return True
    if made.archspec and host.archspec:
        return bool(archspec.cpu.TARGETS[made.archspec] <= archspec.cpu.TARGETS[host.archspec])
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this process may use of its machine.

    Attributes:
        classes: the device classes it can run, most specific first; the last is `portable`.
        hardware: the CPU class of the hardware itself, as if no limit were set; None below x86-64-v3.
        why_not: for each class that is out of reach, the reason.
    """

    classes: tuple[str, ...]
    hardware: str | None
    why_not: Mapping[str, str]


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """What this machine is, as this process may use it: CPUID, cut by the kernel's view and by the limits in `environ`.

    Args:
        environ: the environment that limits are read from; this process's by default.
    """
    environ = os.environ if environ is None else environ
    features, why_not = _cpu_features(), dict[str, str]()
    allowed = _allowed_level(environ)
    cpu: list[str] = []
    hardware: str | None = None
    for rank, name in enumerate(_LEVELS):
        missing = _needed(name) - features
        if missing:
            why_not[name] = f"the CPU lacks {', '.join(sorted(missing))}"
            continue
        hardware = name
        if rank > allowed[0]:
            why_not[name] = f"{allowed[1]} limits this process"
            continue
        cpu.insert(0, name)
    cuda, cuda_why_not = _cuda_classes()
    return Machine(classes=(*cuda, *cpu, PORTABLE), hardware=hardware, why_not={**why_not, **cuda_why_not})


def limits_hold(name: str, machine: Machine, environ: Mapping[str, str] | None = None) -> bool:
    """Whether packed weights of class `name` are what oneDNN expects in this process.

    True when the class is the hardware's own, or when the environment limits oneDNN to it. The environment is believed: set it
    before the process's first oneDNN operation.
    """
    environ = os.environ if environ is None else environ
    wanted = device_class(name)
    if wanted.kind != "cpu" or name == machine.hardware:
        return True
    limit = _onednn_limit(environ)
    return limit is not None and _onednn_level(limit) == _LEVELS.index(name)


def best_level(classes: Collection[str]) -> str | None:
    """The best of the x86-64 levels among `classes`; what `auto` means on a machine of those classes."""
    return next((name for name in reversed(_LEVELS) if name in classes), None)


def auto_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """What `auto` means on a machine of these classes: its x86-64 level, and `portable`.

    GPUs are detected, and no lowering of this release builds for one: a CUDA class is left out here, and refused where it is named.
    """
    level = best_level(classes)
    return (*((level,) if level else ()), PORTABLE)


def available_threads() -> int:
    """How many CPUs this process may run on, by its affinity."""
    return len(os.sched_getaffinity(0))


def _needed(name: str) -> frozenset[str]:
    return frozenset(archspec.cpu.TARGETS[str(device_class(name).archspec)].features)


@functools.cache
def _cpu_features() -> frozenset[str]:
    """Features that CPUID reports and the kernel lets processes use. /proc/cpuinfo alone shows an emulator's host."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    cpuid = set(archspec.cpu.detect.CpuidInfoCollector().features)
    if "pni" in cpuid:  # archspec's CPUID table knows SSE3 by its first name only
        cpuid.add("sse3")
    kernel = archspec.cpu.detect.proc_cpuinfo().features
    return frozenset(cpuid & set(kernel))


def _allowed_level(environ: Mapping[str, str]) -> tuple[int, str]:
    """The best index into _LEVELS that the environment leaves, and the variable that says so."""
    allowed, by = len(_LEVELS) - 1, ""
    limit = _onednn_limit(environ)
    if limit is not None and _onednn_level(limit) < allowed:
        allowed, by = _onednn_level(limit), f"ONEDNN_MAX_CPU_ISA={limit}"
    aten = environ.get("ATEN_CPU_CAPABILITY", "").lower()
    rank = {"default": -1, "avx2": 0}.get(aten, len(_LEVELS) - 1)
    if rank < allowed:
        allowed, by = rank, f"ATEN_CPU_CAPABILITY={aten}"
    return allowed, by


def _onednn_limit(environ: Mapping[str, str]) -> str | None:
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA")
    return limit.upper() if limit and limit.upper() not in ("ALL", "DEFAULT") else None


def _onednn_level(limit: str) -> int:
    """The index into _LEVELS of one of oneDNN's ISA names (SSE41, AVX, AVX2..., AVX512_CORE..., AVX10_...)."""
    if limit.startswith(("AVX512", "AVX10")):
        return 1
    return 0 if limit.startswith("AVX2") else -1


@functools.cache
def _cuda_classes() -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The classes of the GPUs that NVML shows, and a reason where it cannot tell. Starts no CUDA context."""
    try:
        import pynvml
    except ImportError:
        if Path("/dev/nvidiactl").exists():
            return (), {"cuda": "an NVIDIA driver is here, but not NVML's bindings; pip install nvidia-ml-py"}
        return (), {"cuda": "no NVIDIA driver"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), {"cuda": f"NVML: {error}"}
    try:
        names: list[str] = []
        unknown: dict[str, str] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
            name = f"cuda-sm{major * 10 + minor}"
            if name not in DEVICE_CLASSES:
                unknown[name] = "this compute capability has no device class yet"
            elif name not in names:
                names.append(name)
        return tuple(names), unknown
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
