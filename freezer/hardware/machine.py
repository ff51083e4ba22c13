"""This machine: its CPU, instruction sets, GPUs and the device classes that it can serve. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from freezer.hardware.device_classes import DEVICE_CLASSES, PORTABLE, DeviceClass
from freezer.hardware.host import Host, this_host
from freezer.hardware.instruction_sets import layouts, limited_by, onednn_features, usable_features
from freezer.hardware.nvml import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this process may use of its machine.

    Attributes:
        classes: device classes that it can run, most specific first; `portable` is last.
        hardware: CPU class of the hardware without the limits of the environment; None for an unknown CPU.
        why_not: the reason for each class of this architecture that it cannot run.
        layouts: oneDNN's layout of packed weights in this process, by dtype.
        limits: the variables that limit this process, as text.
    """

    classes: tuple[str, ...]
    hardware: str | None
    why_not: Mapping[str, str]
    layouts: Mapping[str, str]
    limits: str = ""

    @property
    def next_better(self) -> dict[str, str]:
        """The next better CPU classes and all GPU classes that it cannot run, with the reason."""
        known = {name: DEVICE_CLASSES[name].includes for name in self.why_not if name in DEVICE_CLASSES}
        return {name: why for name, why in self.why_not.items() if set(known.get(name, ())) <= set(self.classes)}

    def serves(self, wanted: Mapping[str, str]) -> bool:
        """Whether oneDNN in this process expects weights packed in these layouts, by dtype."""
        return all(self.layouts.get(dtype) == layout for dtype, layout in wanted.items())


def detect(environ: Mapping[str, str] | None = None) -> Machine:
    """Detect this machine under the limits in `environ`, by default this process's; they only work if set before torch's import."""
    return describe_host(this_host(), os.environ if environ is None else environ)


def describe_host(host: Host, environ: Mapping[str, str]) -> Machine:
    """Describe a host to a process with this environment."""
    usable, why_not = usable_features(host.features, environ), dict[str, str]()
    cpu: list[str] = []
    hardware: str | None = None
    for found in (item for item in DEVICE_CLASSES.values() if item.kind == "cpu"):
        if found.machine != host.machine:
            continue
        reason = _out_of_reach(found, host)
        if reason is None:
            hardware = found.name
            if not found.features <= usable:
                reason = f"{limited_by(environ)} limits this process"
        if reason is None:
            cpu.insert(0, found.name)
        else:
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
    """Why a CPU of the same architecture is not of a class; None if it is."""
    if wanted.vendor is not None and wanted.vendor != host.vendor:
        return f"the CPU is of {host.vendor or 'an unknown vendor'}, and the class is of {wanted.vendor}"
    missing = wanted.features - host.features
    if missing:
        return f"the CPU lacks {', '.join(sorted(missing))}"
    if wanted.sve_bits is not None and wanted.sve_bits != host.sve_bits:
        return f"SVE's vectors have {host.sve_bits} bits, and the class's {wanted.sve_bits}"
    return None


def _cuda_classes(host: Host, environ: Mapping[str, str], cpu: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Classes of the visible GPUs, in order, and the reasons for other classes."""
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
    """The GPUs that CUDA_VISIBLE_DEVICES selects. As in CUDA, the list ends at the first unknown entry.

    Numbers follow NVML's order only under CUDA_DEVICE_ORDER=PCI_BUS_ID. Otherwise CUDA puts the fastest first, so numbers of GPUs
    that differ are ignored.
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
