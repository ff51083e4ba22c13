"""This machine: its CPU, instruction sets, GPUs and the device classes that it can serve. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from freezer.hardware.cgroups import available_cpus
from freezer.hardware.device_classes import DEVICE_CLASSES, PORTABLE, DeviceClass
from freezer.hardware.host import Gpu, Host, this_host
from freezer.hardware.instruction_sets import layouts, limited_by, onednn_features, usable_features


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


def available_threads() -> int:
    """How many CPUs this process may run on, by its affinity and the quotas of its control groups."""
    return available_cpus()
