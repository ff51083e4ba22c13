"""Device classes: families of hardware that one artifact serves. Imports no torch.

An artifact made for class `a` can run on a machine of class `m` when `can_run(a, m)`: CPU classes follow archspec's order of
microarchitectures, a CUDA class runs on exactly its compute capability, and `portable` runs anywhere.

Running is not enough. Packed weights are laid out for the instruction set that oneDNN chose when they were packed, and in another
layout they are 10 to 30 times slower, without a word. `Machine.layouts` is what oneDNN chooses in this process: another class's
payload is served where its layouts are the same, or where oneDNN is limited to that class before its first operation.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import archspec.cpu

from freezer.errors import UsageError
from freezer.host import Gpu, Host, this_host
from freezer.isa_limits import layouts, limited_by, onednn_features, usable_features
from freezer.thread_budget import available_cpus

PORTABLE = "portable"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClass:
    """A family of hardware, and how a build targets it.

    Attributes:
        name: as used everywhere: `cpu-x86-64-v4`, `cuda-sm90`, `portable`.
        kind: the device that a payload of this class runs on; a portable one runs on a CPU.
        machine: `x86_64` or `aarch64`; of a CUDA class empty, since its host code has a class of its own.
        archspec: archspec's name of the class, whose vendor and place in the order it has; None where archspec has none.
        base: archspec's name of the baseline that code is compiled for; its features are needed, and `adds` besides.
        adds: features above the baseline that code for the class may use, each by a flag of `flags`.
        includes: the next lesser classes, which it can run.
        march: the compiler's target; `flags` come after it.
        simdlen: width of Inductor's vectors in bits.
        sve_bits: the length of SVE's vectors, exactly.
        limits: environment that makes oneDNN, ATen and MKL choose what a CPU of just this class would choose; it counts only
            when set before torch is imported.
        capability: of a CUDA class, major * 10 + minor.
        host: of a CUDA class, the CPU class that its host code is compiled for.
    """

    name: str
    kind: Literal["cpu", "cuda", "portable"]
    machine: str = ""
    archspec: str | None = None
    base: str | None = None
    adds: tuple[str, ...] = ()
    vendor: str | None = None
    includes: tuple[str, ...] = ()
    march: str | None = None
    flags: tuple[str, ...] = ()
    simdlen: int | None = None
    sve_bits: int | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    capability: int | None = None
    host: str | None = None

    @property
    def features(self) -> frozenset[str]:
        """All that a CPU of the class has and its code may use, by archspec's names."""
        return (archspec.cpu.TARGETS[self.base].features if self.base else frozenset()) | frozenset(self.adds)

    @property
    def layouts(self) -> Mapping[str, str]:
        """How packed weights of the class are laid out, by dtype."""
        return layouts(onednn_features(self.features, self.limits), self.sve_bits)


def _x86(
    name: str,
    includes: tuple[str, ...],
    isa: str,
    *,
    archspec_name: str | None,
    vendor: str | None = None,
    adds: Mapping[str, str] | None = None,
) -> DeviceClass:
    """A class from x86-64-v3 on.

    Args:
        isa: oneDNN's name of what the class has.
        adds: features above x86-64-v4, each with the compiler's flag for it.
    """
    wide = isa != "AVX2"
    level = "v4" if wide else "v3"
    aten = ("avx512", "AVX512") if wide else ("avx2", "AVX2")
    return DeviceClass(
        name=name,
        kind="cpu",
        machine="x86_64",
        archspec=archspec_name,
        base=f"x86_64_{level}",
        adds=tuple(adds or ()),
        vendor=vendor,
        includes=includes,
        march=f"x86-64-{level}",
        flags=tuple((adds or {}).values()),
        simdlen=512 if wide else 256,
        limits={"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": aten[0], "MKL_ENABLE_INSTRUCTIONS": aten[1]},
    )


def _arm(
    name: str, archspec_name: str, march: str, adds: tuple[str, ...], includes: tuple[str, ...] = (), sve_bits: int | None = None
) -> DeviceClass:
    """An Arm class. oneDNN has no limits there, so a lesser class's packed weights serve only where the layouts are the same."""
    return DeviceClass(
        name=name,
        kind="cpu",
        machine="aarch64",
        archspec=archspec_name,
        base="aarch64",
        adds=adds,
        includes=includes,
        march=march,
        simdlen=sve_bits or 128,
        sve_bits=sve_bits,
    )


def _cuda(capability: int) -> DeviceClass:
    return DeviceClass(name=f"cuda-sm{capability}", kind="cuda", capability=capability, host="cpu-x86-64-v3")


_VNNI = {"avx512_vnni": "-mavx512vnni"}
_BF16 = {**_VNNI, "avx512_bf16": "-mavx512bf16"}
_AMX = {
    **_BF16,
    "avx512_fp16": "-mavx512fp16",
    "amx_tile": "-mamx-tile",
    "amx_int8": "-mamx-int8",
    "amx_bf16": "-mamx-bf16",
}
_NEON = ("fp", "asimd")
_SVE = (
    *(*_NEON, "crc32", "atomics", "fphp", "asimdhp", "asimdrdm", "asimddp", "asimdfhm", "jscvt", "fcma", "lrcpc", "ilrcpc"),
    *("flagm", "bf16", "i8mm", "sve", "svebf16", "svei8mm"),
)

DEVICE_CLASSES: Mapping[str, DeviceClass] = {
    found.name: found
    for found in (
        DeviceClass(name=PORTABLE, kind="portable"),
        _x86("cpu-x86-64-v3", (), "AVX2", archspec_name="x86_64_v3"),
        _x86("cpu-x86-64-v4", ("cpu-x86-64-v3",), "AVX512_CORE", archspec_name="x86_64_v4"),
        _x86(
            "cpu-cascadelake",
            ("cpu-x86-64-v4",),
            "AVX512_CORE_VNNI",
            archspec_name="cascadelake",
            vendor="GenuineIntel",
            adds=_VNNI,
        ),
        _x86("cpu-cooperlake", ("cpu-cascadelake",), "AVX512_CORE_BF16", archspec_name=None, vendor="GenuineIntel", adds=_BF16),
        _x86("cpu-zen4", ("cpu-x86-64-v4",), "AVX512_CORE_BF16", archspec_name="zen4", vendor="AuthenticAMD", adds=_BF16),
        _x86(
            "cpu-sapphirerapids",
            ("cpu-cooperlake",),
            "AVX512_CORE_AMX",
            archspec_name="sapphirerapids",
            vendor="GenuineIntel",
            adds=_AMX,
        ),
        _arm("cpu-aarch64", "aarch64", "armv8-a", _NEON),
        _arm("cpu-neoverse-v1", "neoverse_v1", "armv8.4-a+sve+bf16+i8mm", _SVE, ("cpu-aarch64",), 256),
        _arm(
            "cpu-neoverse-v2", "neoverse_v2", "armv9-a+bf16+i8mm", (*_SVE, "sb", "flagm2", "frint", "sve2"), ("cpu-aarch64",), 128
        ),
        _cuda(75),
        _cuda(80),
        _cuda(86),
        _cuda(89),
        _cuda(90),
        _cuda(100),
    )
}

_LEVELS = ("cpu-x86-64-v3", "cpu-x86-64-v4")
"""The x86-64 classes that `auto` chooses from, least first."""


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
    if made.name == host.name or made.kind == PORTABLE:
        return True
    return any(can_run(artifact, lesser) for lesser in host.includes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this process may use of its machine.

    Attributes:
        classes: the device classes it can run, most specific first; the last is `portable`.
        hardware: the CPU class of the hardware itself, as if no limit were set; None where no class has it.
        why_not: for each class that is out of reach, the reason.
        layouts: how oneDNN lays packed weights out in this process, by dtype.
        limits: the variables that limit this process, as text.
    """

    classes: tuple[str, ...]
    hardware: str | None
    why_not: Mapping[str, str]
    layouts: Mapping[str, str]
    limits: str = ""

    @property
    def next_better(self) -> dict[str, str]:
        """Of the classes out of reach those that come next after what is in reach, and of GPUs all, with the reason."""
        known = {name: DEVICE_CLASSES[name].includes for name in self.why_not if name in DEVICE_CLASSES}
        return {name: why for name, why in self.why_not.items() if set(known.get(name, ())) <= set(self.classes)}

    def serves(self, wanted: Mapping[str, str]) -> bool:
        """Whether weights packed in these layouts, by dtype, are what oneDNN expects in this process."""
        return all(self.layouts.get(dtype) == layout for dtype, layout in wanted.items())


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """What this machine is, as this process may use it: CPUID, cut by the kernel's view and by the limits in `environ`.

    Args:
        environ: the environment that limits are read from; this process's by default. It is believed: set it before torch is
            imported.
    """
    return describe_host(this_host(), os.environ if environ is None else environ)


def describe_host(host: Host, environ: Mapping[str, str]) -> Machine:
    """What a machine is to a process of that environment."""
    usable, why_not = usable_features(host.features, environ), dict[str, str]()
    cpu: list[str] = []
    hardware: str | None = None
    for found in (item for item in DEVICE_CLASSES.values() if item.kind == "cpu"):
        reason = _out_of_reach(found, host)
        if reason is None:
            hardware = found.name
            if not found.features <= usable:
                reason = f"{limited_by(environ)} limits this process"
        if reason is None:
            cpu.insert(0, found.name)
        elif found.machine == host.machine:
            why_not[found.name] = reason
    cuda, no_cuda = _cuda_classes(host, environ, cpu)
    return Machine(
        classes=(*cuda, *cpu, PORTABLE),
        hardware=hardware,
        why_not={**why_not, **no_cuda},
        layouts=layouts(onednn_features(host.features, environ), host.sve_bits),
        limits=limited_by(environ),
    )


def _out_of_reach(wanted: DeviceClass, host: Host) -> str | None:
    """Why the hardware is not of a CPU class; None where it is."""
    if wanted.machine != host.machine:
        return f"the CPU is {host.machine}"
    if wanted.vendor is not None and wanted.vendor != host.vendor:
        return f"the CPU is of {host.vendor or 'an unknown vendor'}, and the class is of {wanted.vendor}"
    missing = wanted.features - host.features
    if missing:
        return f"the CPU lacks {', '.join(sorted(missing))}"
    if wanted.sve_bits is not None and wanted.sve_bits != host.sve_bits:
        return f"SVE's vectors have {host.sve_bits} bits, and the class's {wanted.sve_bits}"
    return None


def _cuda_classes(host: Host, environ: Mapping[str, str], cpu: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """The classes of the GPUs that the process sees, in their order, and why not others."""
    if not host.gpus:
        return [], {"cuda": host.no_gpu}
    gpus = _visible(host.gpus, environ)
    found: list[str] = []
    why_not: dict[str, str] = {} if gpus else {"cuda": f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')} hides all GPUs"}
    for name in dict.fromkeys(f"cuda-sm{gpu.capability}" for gpu in gpus):
        known = DEVICE_CLASSES.get(name)
        if known is None:
            why_not[name] = "this compute capability has no device class yet"
        elif known.host not in cpu:
            why_not[name] = f"its host code is made for {known.host}, and this process cannot run that"
        else:
            found.append(name)
    return found, why_not


def _visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves. It ends at the first entry that names none, as CUDA has it.

    Numbers are in NVML's order only under CUDA_DEVICE_ORDER=PCI_BUS_ID; without it CUDA puts the fastest first, and of unlike GPUs
    none is taken by number.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    alike = len({gpu.capability for gpu in gpus}) == 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found: list[Gpu] = []
    for item in (part.strip() for part in listed.split(",")):
        if item.isdigit():
            matching = list(gpus[int(item) : int(item) + 1]) if alike else []
        else:
            matching = [gpu for gpu in gpus if item and gpu.uuid.startswith(item)]
        if len(matching) != 1:
            break
        found += matching
    return found


def best_level(classes: Collection[str]) -> str | None:
    """What `auto` means on a machine of those classes: the best x86-64 level, or the most special Arm class."""
    arm = (name for name in DEVICE_CLASSES if DEVICE_CLASSES[name].machine == "aarch64")
    return next((name for name in (*reversed(_LEVELS), *reversed(tuple(arm))) if name in classes), None)


def auto_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """What `auto` means on a machine of these classes: its x86-64 level, its CUDA capability where it has a GPU, and `portable`."""
    level = best_level(classes)
    gpus = (name for name in classes if name in DEVICE_CLASSES and DEVICE_CLASSES[name].kind == "cuda")
    return (*((level,) if level else ()), *gpus, PORTABLE)


def available_threads() -> int:
    """How many CPUs this process may run on, by its affinity and the quotas of its control groups."""
    return available_cpus()
