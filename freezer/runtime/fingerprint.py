"""Describe the machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from freezer.hardware.machine import detect
from freezer.runtime.cuda import facts_of
from freezer.runtime.devices import CPU

_OF_SPEED = re.compile(
    r"(?:OMP|KMP|GOMP|MKL|ONEDNN|DNNL|ATEN|MALLOC|TORCH_MKLDNN)_\w+|LD_PRELOAD|GLIBC_TUNABLES|TORCH_LINEAR_FLATTEN_3D|"
    r"PYTORCH_TENSOREXPR_\w+|TORCH_JIT_DISABLE_NEW_EXECUTOR"
)


def recorded(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that influence speed, which a judge records with its measurements."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if _OF_SPEED.fullmatch(name)}


def host_fingerprint(device: torch.device = CPU) -> dict[str, Any]:
    """Host record of a measurement: CPU, kernel, limits of the process, and GPU. Never part of a key."""
    import archspec.cpu.detect

    return {
        "cpu": archspec.cpu.detect.brand_string(),
        "classes": list(detect().classes),
        "num_cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "kernel": platform.release(),
        "environment": recorded(),
        **({"gpu": facts_of(device)} if device.type == "cuda" else {}),
    }
