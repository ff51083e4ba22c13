"""Device classes: families of hardware that one artifact serves. Imports no torch.

An artifact for class `a` runs on a machine of class `m` if `can_run(a, m)`: CPU classes follow archspec's order of
microarchitectures, a CUDA class runs on exactly its compute capability, and `portable` runs anywhere.

It also has to be fast. oneDNN packs weights for one instruction set, and silently takes 10 to 30 times as long with another layout.
`Machine.layouts` is oneDNN's choice in this process: a payload of another class serves if its layouts are the same, or if oneDNN is
limited to that class before its first operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import archspec.cpu

from freezer.errors import UsageError
from freezer.hardware.instruction_sets import layouts, onednn_features

PORTABLE = "portable"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClass:
    """A family of hardware, and how a build targets it.

    Attributes:
        name: `cpu-x86-64-v4`, `cuda-sm90`, `portable`.
        kind: device that payloads run on; portable ones run on a CPU.
        machine: `x86_64` or `aarch64`; empty for CUDA, whose host code has a class of its own.
        archspec: archspec's name of the class; None if archspec has none.
        base: archspec's name of the baseline that code is compiled for.
        adds: further features that the class needs and its code may use, enabled by `flags`.
        includes: the next lesser classes, which it can run.
        march: target of the compiler, followed by `flags`.
        simdlen: width of Inductor's vectors, in bits.
        sve_bits: exact length of SVE's vectors.
        limits: environment that makes oneDNN, ATen and MKL behave as on a CPU of this class; set it before torch is imported.
        capability: of a CUDA class, major * 10 + minor.
        host: of a CUDA class, the CPU class of its host code.
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
        """Features of every CPU of the class, by archspec's names."""
        return (archspec.cpu.TARGETS[self.base].features if self.base else frozenset()) | frozenset(self.adds)

    @property
    def layouts(self) -> Mapping[str, str]:
        """Layout of packed weights of the class, by dtype."""
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
        isa: oneDNN's name of the instruction set.
        adds: features above x86-64-v4 with the compiler's flags.
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
    """An Arm class. oneDNN cannot be limited there, so lesser classes serve only if their layouts are the same."""
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
"""The x86-64 classes that `auto` chooses from, lowest first."""


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
    """Whether artifacts of class `artifact` run on machines of class `machine`: a partial order."""
    if artifact in (machine, PORTABLE):
        return True
    return any(can_run(artifact, lesser) for lesser in device_class(machine).includes)


def best_level(classes: Collection[str]) -> str | None:
    """The CPU class that `auto` selects from a machine's classes: the best x86-64 level, or the most specific Arm class."""
    arm = (name for name in DEVICE_CLASSES if DEVICE_CLASSES[name].machine == "aarch64")
    return next((name for name in (*reversed(_LEVELS), *reversed(tuple(arm))) if name in classes), None)


def auto_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """The classes that `auto` selects from a machine's classes: CPU level, GPUs, `portable`."""
    level = best_level(classes)
    gpus = (name for name in classes if name in DEVICE_CLASSES and DEVICE_CLASSES[name].kind == "cuda")
    return (*((level,) if level else ()), *gpus, PORTABLE)
