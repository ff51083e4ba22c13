"""This machine: its CPU, GPUs and the device classes that it can serve.

Imports no torch, and starts no CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import archspec.cpu.detect

from freezer.codec import frozen
from freezer.hardware import cuda
from freezer.hardware.device_classes import (
    DEVICE_CLASSES,
    PORTABLE,
    DeviceClass,
    layouts,
    limited_by,
    onednn_features,
    usable_features,
)

_PR_SVE_GET_VL = 51
_SVE_VL_LEN_MASK = 0xFFFF
_HWCAPS = {
    16: "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma"
    " lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca"
    " pacg",
    26: "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm"
    " svef64mm svebf16 i8mm bf16",
}
"""Names in /proc/cpuinfo of the bits of AT_HWCAP and AT_HWCAP2 on Arm, from bit 0 (Linux's
asm/hwcap.h).
"""


@frozen
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
        emulated: whether qemu-user or the like runs this process on another CPU.
    """

    machine: str
    vendor: str = ""
    features: frozenset[str] = frozenset()
    sve_bits: int | None = None
    gpus: tuple[cuda.Gpu, ...] = ()
    no_gpu: str = "no NVIDIA driver"
    driver: str | None = None
    emulated: bool = False


@functools.cache
def this_host() -> Host:
    """The machine that this process runs on."""
    machine, (gpus, no_gpu, driver) = platform.machine(), _gpus()
    vendor, sve_bits, features = "", None, frozenset[str]()
    if machine == "x86_64":
        vendor, features = _x86()
    elif machine == "aarch64":
        features = _arm()
        sve_bits = _sve_bits() if "sve" in features else None
    return Host(
        machine=machine,
        vendor=vendor,
        features=features,
        sve_bits=sve_bits,
        gpus=gpus,
        no_gpu=no_gpu,
        driver=driver,
        emulated=is_emulated(),
    )


def is_emulated() -> bool:
    """Whether an emulator of user programs runs this process: it shows the program as the
    executable of the process, but itself as that of the thread.

    Such a process sees another CPU than /proc/cpuinfo, or the same one without some features. An
    emulator of whole machines is not detected.
    """
    try:
        return Path("/proc/self/exe").readlink() != Path("/proc/thread-self/exe").readlink()
    except OSError:
        return False


def _x86() -> tuple[str, frozenset[str]]:
    """Vendor and features from CPUID that the kernel enables; /proc/cpuinfo alone shows the host of
    an emulator.
    """
    cpuid = archspec.cpu.detect.CpuidInfoCollector()
    features = set(cpuid.features)
    if "pni" in features:  # the first name of SSE3, the only one in archspec's CPUID table
        features.add("sse3")
    return cpuid.vendor, frozenset(features & set(archspec.cpu.detect.proc_cpuinfo().features))


def _arm() -> frozenset[str]:
    """Features that the kernel grants this process; under qemu /proc/cpuinfo shows the host."""
    found = set()
    for kind, names in _HWCAPS.items():
        bits = _auxiliary(kind)
        for bit, name in enumerate(names.split()):
            if bits >> bit & 1:
                found.add(name)
    return frozenset(found)


def _auxiliary(kind: int) -> int:
    """A value of the auxiliary vector."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes = [ctypes.c_ulong]
    getauxval.restype = ctypes.c_ulong
    return int(getauxval(kind))


def _sve_bits() -> int | None:
    length = ctypes.CDLL(None).prctl(_PR_SVE_GET_VL, 0, 0, 0, 0)
    return (length & _SVE_VL_LEN_MASK) * 8 if length > 0 else None


def has_driver() -> bool:
    """Whether an NVIDIA driver or its NVML is here.

    Without it pynvml, whose import is slow, is not imported.
    """
    if Path("/dev/nvidiactl").exists():
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _gpus() -> tuple[tuple[cuda.Gpu, ...], str, str | None]:
    """The GPUs, the reason if there are none, and the driver's version."""
    if not has_driver():
        return (), "no NVIDIA driver", None
    try:
        with cuda.opened():
            gpus = cuda.gpus()
            return gpus, "" if gpus else "NVML shows no GPU", cuda.driver_version()
    except cuda.NvmlError as error:
        hint = "a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return (), f"an NVIDIA driver is here, but NVML: {error} ({hint})", None


@frozen
class Machine:
    """What this process may use of its machine.

    Attributes:
        classes: device classes that it can run, most specific first; `portable` is last.
        hardware: CPU class of the hardware without the limits of the environment; None for an
            unknown CPU.
        why_not: the reason for each class of this architecture that it cannot run.
        layouts: oneDNN's layout of packed weights in this process, by dtype.
        limits: the variables that limit this process, as text.
        emulated: as in `Host`; speeds are not measured then.
    """

    classes: tuple[str, ...]
    hardware: str | None
    why_not: Mapping[str, str]
    layouts: Mapping[str, str]
    limits: str = ""
    emulated: bool = False

    @property
    def next_better(self) -> dict[str, str]:
        """The next better CPU classes and all GPU classes that it cannot run, with the reason."""
        better = {}
        for name, reason in self.why_not.items():
            known = DEVICE_CLASSES.get(name)
            if known is None or set(known.includes) <= set(self.classes):
                better[name] = reason
        return better

    def serves(self, wanted: Mapping[str, str]) -> bool:
        """Whether oneDNN in this process expects weights packed in these layouts, by dtype."""
        return all(self.layouts.get(dtype) == layout for dtype, layout in wanted.items())


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """Detect this machine under the limits in `environ`, by default this process's; they only work
    if set before torch's import.
    """
    return describe_host(this_host(), os.environ if environ is None else environ)


def describe_host(host: Host, environ: Mapping[str, str]) -> Machine:
    """Describe a host to a process with this environment."""
    usable = usable_features(host.features, environ)
    why_not = {}
    cpu: list[str] = []
    hardware: str | None = None
    for device in DEVICE_CLASSES.values():
        if device.kind != "cpu" or device.machine != host.machine:
            continue
        reason = _out_of_reach(device, host)
        if reason is None:
            hardware = device.name
            if device.features <= usable:
                cpu.insert(0, device.name)
                continue
            reason = f"{limited_by(environ)} limits this process"
        why_not[device.name] = reason
    cuda, no_cuda = _cuda_classes(host, environ, cpu)
    return Machine(
        classes=(*cuda, *cpu, PORTABLE),
        hardware=hardware,
        why_not={**why_not, **no_cuda},
        layouts=layouts(onednn_features(host.features, environ), host.sve_bits),
        limits=limited_by(environ),
        emulated=host.emulated,
    )


def _out_of_reach(wanted: DeviceClass, host: Host) -> str | None:
    """Why a CPU of the same architecture is not of a class; None if it is."""
    if wanted.vendor is not None and wanted.vendor != host.vendor:
        return (
            f"the CPU is of {host.vendor or 'an unknown vendor'}, and the class is of"
            f" {wanted.vendor}"
        )
    missing = wanted.features - host.features
    if missing:
        return f"the CPU lacks {', '.join(sorted(missing))}"
    if wanted.sve_bits is not None and wanted.sve_bits != host.sve_bits:
        return f"SVE's vectors have {host.sve_bits} bits, and the class's {wanted.sve_bits}"
    return None


def _cuda_classes(
    host: Host, environ: Mapping[str, str], cpu: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Classes of the visible GPUs, in order, and the reasons for other classes."""
    if not host.gpus:
        return [], {"cuda": host.no_gpu}
    gpus = _visible(host.gpus, environ)
    classes = []
    why_not = {}
    if not gpus:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why_not["cuda"] = f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs"
    for name in dict.fromkeys(f"cuda-sm{gpu.capability}" for gpu in gpus):
        known = DEVICE_CLASSES.get(name)
        if known is None:
            why_not[name] = "this compute capability has no device class yet"
        elif known.host not in cpu:
            why_not[name] = (
                f"its host code is made for {known.host}, and this process cannot run that"
            )
        else:
            classes.append(name)
    return classes, why_not


def _visible(gpus: Sequence[cuda.Gpu], environ: Mapping[str, str]) -> list[cuda.Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects. As in CUDA, the list ends at the first unknown
    entry.

    Numbers follow NVML's order only under CUDA_DEVICE_ORDER=PCI_BUS_ID. Otherwise CUDA puts the
    fastest first, so numbers of GPUs that differ are ignored.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    alike = len({gpu.capability for gpu in gpus}) == 1
    numbers_count = alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    visible = []
    for part in listed.split(","):
        name = part.strip()
        if name.isdigit():
            matching = list(gpus[int(name) : int(name) + 1]) if numbers_count else []
        else:
            matching = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(matching) != 1:
            break
        visible += matching
    return visible
