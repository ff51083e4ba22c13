"""Machines in words: processors, virtual machines with holes and GPUs, for tests of what each of
them can run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import archspec.cpu

from freezer.hardware import Host
from freezer.hardware.cuda import Gpu
from freezer.serving.process import ServingProcess

INTEL, AMD = "GenuineIntel", "AuthenticAMD"
H100, A100 = Gpu("GPU-h100", 90), Gpu("GPU-a100", 80)


def x86(
    name: str,
    vendor: str,
    *,
    also: Collection[str] = (),
    lacks: Collection[str] = (),
    gpus: tuple[Gpu, ...] = (),
) -> Host:
    """An x86-64 machine with the features that archspec lists for a microarchitecture."""
    features = (archspec.cpu.TARGETS[name].features | set(also)) - set(lacks)
    return Host(machine="x86_64", vendor=vendor, features=frozenset(features), gpus=gpus)


def arm(name: str, sve_bits: int | None = None) -> Host:
    """An Arm machine with the features that archspec lists for a microarchitecture."""
    return Host(
        machine="aarch64",
        features=frozenset(archspec.cpu.TARGETS[name].features),
        sve_bits=sve_bits,
    )


AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
HASWELL = x86("haswell", INTEL)
IVY_BRIDGE = x86("ivybridge", INTEL)
SKYLAKE_SERVER = x86("skylake_avx512", INTEL)
CASCADE_LAKE = x86("cascadelake", INTEL)
SAPPHIRE_RAPIDS = x86("sapphirerapids", INTEL, also=("avx512_fp16", "avx_vnni"))
ALDER_LAKE = x86("haswell", INTEL, also=("avx_vnni",))
ZEN5 = x86("zen5", AMD)
ZEN4_GUEST = x86("zen4", AMD, lacks=("pku", "flush_l1d", "clwb"))
"""What hypervisors hide of a Zen 4, and no compiler ever uses unasked."""

CASCADE_LAKE_MASKED = x86("cascadelake", INTEL, lacks=AVX512)
OF_TOMORROW = x86(
    "sapphirerapids", INTEL, also=("avx512_fp16", "avx_vnni", "amx_fp16", "avx10_2", "apx_f")
)
"""A processor that archspec has not heard of."""

GRAVITON2 = arm("neoverse_n1")
GRAVITON3 = arm("neoverse_v1", 256)
GRAVITON4 = arm("neoverse_v2", 128)
A64FX = arm("a64fx", 512)
RISCV = Host(machine="riscv64")


def serving_on(host: Host, num_threads: int = 1, **changes: Any) -> ServingProcess:
    """A process on a described host, in which `manifest_of` would serve unless changed."""
    process = ServingProcess(host=host, environ={}, num_threads=num_threads, torch_version="2.13.0")
    return replace(process, **changes)
