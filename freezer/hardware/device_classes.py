"""Device classes: families of hardware that one artifact serves. Imports no torch.

An artifact for class `a` runs on a machine of class `m` if `can_run(a, m)`: CPU classes follow
archspec's order of microarchitectures, a CUDA class runs on exactly its compute capability, and
`portable` runs anywhere.

It also has to be fast. oneDNN packs weights for one instruction set, and silently takes up to 12
times as long with another layout. `Machine.layouts` is oneDNN's choice in this process: a payload
of another class serves if its layouts are the same, or if oneDNN is limited to that class before
its first operation. oneDNN and ATen read their limits once, before their first operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Literal

import archspec.cpu

from freezer.codec import frozen
from freezer.errors import UsageError, expected_names

_STEPS: Mapping[str, frozenset[str]] = {
    "SSE41": frozenset(),
    "AVX": frozenset(),
    "AVX2": frozenset(("avx2", "fma")),
    "AVX512_CORE": frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    "AVX512_CORE_VNNI": frozenset(("avx512_vnni",)),
    "AVX512_CORE_BF16": frozenset(("avx512_bf16",)),
    "AVX512_CORE_FP16": frozenset(("avx512_fp16", "avx_vnni")),
    "AVX512_CORE_AMX": frozenset(("amx_tile", "amx_int8", "amx_bf16")),
    "AVX512_CORE_AMX_FP16": frozenset(("amx_fp16",)),
}
"""oneDNN's instruction sets, least first, each with the features that it adds (oneDNN's guide "CPU
Dispatcher Control").
"""

_ATEN = {"avx2": "AVX2", "default": "AVX"}
"""ATen's capabilities below AVX-512, by oneDNN's names."""

_ON_X86 = (("avx512f", "avx512"), ("avx2", "avx2"))
_ON_ARM = (("sve", "sve"), ("asimd", "neon"))
_KINDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "float32": (*_ON_X86, *_ON_ARM),
    "bfloat16": (
        ("amx_bf16", "amx"),
        ("avx512_bf16", "avx512_bf16"),
        *_ON_X86,
        ("svebf16", "sve_bf16"),
        *_ON_ARM,
    ),
    "float16": (("amx_fp16", "amx"), ("avx512_fp16", "avx512_fp16"), *_ON_X86, *_ON_ARM),
    "int8": (
        *(
            ("amx_int8", "amx"),
            ("avx512_vnni", "avx512_vnni"),
            ("avx512f", "avx512"),
            ("avx_vnni", "avx2_vnni"),
            ("avx2", "avx2"),
        ),
        *(("svei8mm", "sve_i8mm"), *_ON_ARM),
    ),
}
"""Features that determine the layout of packed weights of each dtype, best first."""

_PACKED_AS = {
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
    "float64": "float32",
    "complex64": "float32",
}


def onednn_features(features: Collection[str], environ: Mapping[str, str]) -> frozenset[str]:
    """The features that oneDNN uses under this environment; it ignores a limit that it does not
    know.
    """
    limit = (environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    return _limited(features, limit)


def usable_features(features: Collection[str], environ: Mapping[str, str]) -> frozenset[str]:
    """The features that both oneDNN and ATen use under this environment."""
    return _limited(
        onednn_features(features, environ),
        _ATEN.get(environ.get("ATEN_CPU_CAPABILITY", "").lower(), ""),
    )


def _limited(features: Collection[str], limit: str) -> frozenset[str]:
    """The features without those that only greater instruction sets have."""
    names = list(_STEPS)
    greater = names[names.index(limit) + 1 :] if limit in _STEPS else []
    return frozenset(features).difference(*(_STEPS[name] for name in greater))


def layouts(features: Collection[str], sve_bits: int | None = None) -> dict[str, str]:
    """OneDNN's layouts of packed weights by dtype, `{"float32": "avx512", ...}`, for the features
    and SVE length that it uses.
    """
    by_dtype = {}
    for dtype, kinds in _KINDS.items():
        layout = next((name for feature, name in kinds if feature in features), "plain")
        by_dtype[dtype] = f"{layout}-{sve_bits}" if layout.startswith("sve") else layout
    return by_dtype


def packed_dtype(dtype: str) -> str | None:
    """The dtype whose layout applies to weights of a dtype; None if they are never packed."""
    packed = _PACKED_AS.get(dtype, dtype)
    return packed if packed in _KINDS else None


def limited_by(environ: Mapping[str, str]) -> str:
    """The variables that limit a process, for messages: `ONEDNN_MAX_CPU_ISA=AVX2`."""
    variables = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    return " ".join(f"{name}={environ[name]}" for name in variables if environ.get(name))


PORTABLE = "portable"

RunOn = Literal["on hardware", "under emulation", "nowhere"]


@frozen
class DeviceClass:
    """A family of hardware, and how a build targets it.

    Attributes:
        name: `cpu-x86-64-v4`, `cuda-sm90`, `portable`.
        kind: device that payloads run on; portable ones run on a CPU.
        machine: `x86_64` or `aarch64`; empty for CUDA, whose host code has a class of its own.
        base: archspec's name of the baseline that code is compiled for.
        adds: further features that the class needs and its code may use, enabled by `flags`.
        includes: the next lesser classes, which it can run.
        march: target of the compiler, followed by `flags`.
        simdlen: width of Inductor's vectors, in bits.
        sve_bits: exact length of SVE's vectors.
        limits: environment that makes oneDNN, ATen and MKL behave as on a CPU of this class; set it
            before torch is imported.
        capability: of a CUDA class, major * 10 + minor.
        host: of a CUDA class, the CPU class of its host code.
        run_on: where this project has run artifacts of the class.
    """

    name: str
    kind: Literal["cpu", "cuda", "portable"]
    machine: str = ""
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
    run_on: RunOn = "on hardware"

    @property
    def archspec(self) -> str | None:
        """Archspec's name of the class; None if archspec has none."""
        name = self.name.removeprefix("cpu-").replace("-", "_")
        return name if name in archspec.cpu.TARGETS else None

    @property
    def features(self) -> frozenset[str]:
        """Features of every CPU of the class, by archspec's names."""
        return (archspec.cpu.TARGETS[self.base].features if self.base else frozenset()) | frozenset(
            self.adds
        )

    @property
    def layouts(self) -> Mapping[str, str]:
        """Layout of packed weights of the class, by dtype."""
        return layouts(onednn_features(self.features, self.limits), self.sve_bits)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Lower precisions in which hardware of the class is faster than in float32."""
        if self.capability is not None:
            return tuple(name for name, least in _GAINS_ON_GPU.items() if self.capability >= least)
        if self.kind != "cpu":
            return ()
        return tuple(name for name, needs in _GAINS.items() if needs & self.features)


_GAINS: Mapping[str, frozenset[str]] = {
    "bf16": frozenset(("avx512_bf16", "amx_bf16", "bf16")),
    "int8": frozenset(("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")),
}
"""Features of which one makes matrix products in a precision faster."""

_GAINS_ON_GPU = {"bf16": 80, "fp16": 70, "tf32": 80}
"""Least compute capability, major * 10 + minor, whose tensor cores multiply in a precision."""


def _x86(
    name: str,
    isa: str,
    *includes: str,
    vendor: str | None = None,
    adds: Mapping[str, str] | None = None,
) -> DeviceClass:
    """A class from x86-64-v3 on.

    Args:
        isa: oneDNN's name of the instruction set.
        adds: features above x86-64-v4 with the compiler's flags.
    """
    level, simdlen, mkl = ("v3", 256, "AVX2") if isa == "AVX2" else ("v4", 512, "AVX512")
    return DeviceClass(
        name=name,
        kind="cpu",
        machine="x86_64",
        base=f"x86_64_{level}",
        adds=tuple(adds or ()),
        vendor=vendor,
        includes=includes,
        march=f"x86-64-{level}",
        flags=tuple((adds or {}).values()),
        simdlen=simdlen,
        limits={
            "ONEDNN_MAX_CPU_ISA": isa,
            "ATEN_CPU_CAPABILITY": mkl.lower(),
            "MKL_ENABLE_INSTRUCTIONS": mkl,
        },
    )


def _arm(
    name: str, march: str, adds: tuple[str, ...], *includes: str, sve_bits: int | None = None
) -> DeviceClass:
    """An Arm class. oneDNN cannot be limited there, so lesser classes serve only if their layouts
    are the same.
    """
    return DeviceClass(
        name=name,
        kind="cpu",
        machine="aarch64",
        base="aarch64",
        adds=adds,
        includes=includes,
        march=march,
        simdlen=sve_bits or 128,
        sve_bits=sve_bits,
        run_on="under emulation",
    )


def _cuda(capability: int) -> DeviceClass:
    return DeviceClass(
        name=f"cuda-sm{capability}",
        kind="cuda",
        capability=capability,
        host="cpu-x86-64-v3",
        run_on="on hardware" if capability == 90 else "nowhere",
    )


_INTEL = "GenuineIntel"
_AMD = "AuthenticAMD"
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
    *_NEON,
    *("crc32", "atomics", "fphp", "asimdhp", "asimdrdm", "asimddp", "asimdfhm"),
    *("jscvt", "fcma", "lrcpc", "ilrcpc", "flagm", "bf16", "i8mm", "sve", "svebf16", "svei8mm"),
)
_SVE2 = (*_SVE, "sb", "flagm2", "frint", "sve2")

DEVICE_CLASSES: dict[str, DeviceClass] = {
    found.name: found
    for found in (
        DeviceClass(name=PORTABLE, kind="portable"),
        _x86("cpu-x86-64-v3", "AVX2"),
        _x86("cpu-x86-64-v4", "AVX512_CORE", "cpu-x86-64-v3"),
        _x86(
            "cpu-cascadelake",
            "AVX512_CORE_VNNI",
            "cpu-x86-64-v4",
            vendor=_INTEL,
            adds=_VNNI,
        ),
        _x86(
            "cpu-cooperlake",
            "AVX512_CORE_BF16",
            "cpu-cascadelake",
            vendor=_INTEL,
            adds=_BF16,
        ),
        _x86(
            "cpu-zen4",
            "AVX512_CORE_BF16",
            "cpu-x86-64-v4",
            vendor=_AMD,
            adds=_BF16,
        ),
        _x86(
            "cpu-sapphirerapids",
            "AVX512_CORE_AMX",
            "cpu-cooperlake",
            vendor=_INTEL,
            adds=_AMX,
        ),
        _arm("cpu-aarch64", "armv8-a", _NEON),
        _arm(
            "cpu-neoverse-v1",
            "armv8.4-a+sve+bf16+i8mm",
            _SVE,
            "cpu-aarch64",
            sve_bits=256,
        ),
        _arm(
            "cpu-neoverse-v2",
            "armv9-a+bf16+i8mm",
            _SVE2,
            "cpu-aarch64",
            sve_bits=128,
        ),
        *map(_cuda, (75, 80, 86, 89, 90, 100)),
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
        message = f"unknown device class {name!r}; {expected_names(name, DEVICE_CLASSES)}"
        raise UsageError(message, code="CP-DEVICE-CLASS") from None


def can_run(artifact: str, machine: str) -> bool:
    """Whether artifacts of class `artifact` run on machines of class `machine`: a partial order."""
    if artifact in (machine, PORTABLE):
        return True
    return any(can_run(artifact, lesser) for lesser in device_class(machine).includes)


def best_level(classes: Collection[str]) -> str | None:
    """The CPU class that `auto` selects from a machine's classes: the best x86-64 level, or the
    most specific Arm class.
    """
    for name, known in reversed(DEVICE_CLASSES.items()):
        if name in classes and (name in _LEVELS or known.machine == "aarch64"):
            return name
    return None


def lesser_classes(classes: Collection[str]) -> frozenset[str]:
    """Those of a machine's classes whose CPUs lack instructions that it has. Its x86-64 level and
    its most specific class are not among them.
    """
    included = {name for known in classes for name in DEVICE_CLASSES[known].includes}
    return frozenset(included - {best_level(classes)})


AUTO_PRECISE = "auto-precise"
"""What `auto` becomes for entries with consent to lower precision."""


def auto_classes(classes: Sequence[str], *, precise: bool = False) -> tuple[str, ...]:
    """The classes that `auto` selects from a machine's classes: CPU level, GPUs, `portable`.

    Args:
        classes: the classes of a machine, in any order.
        precise: whether the best CPU class is also selected, if its hardware gains from lower
            precision.
    """
    level = best_level(classes)
    chosen = [level] if level else []
    known = [DEVICE_CLASSES[name] for name in classes if name in DEVICE_CLASSES]
    if precise:
        lesser = {name for each in known for name in each.includes}
        chosen += [each.name for each in known if each.precisions and each.name not in lesser]
    chosen += [each.name for each in known if each.kind == "cuda"]
    return (*dict.fromkeys(chosen), PORTABLE)
