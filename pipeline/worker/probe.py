"""Ask a worker for the toolchain and limits that it builds with. torch is imported in a child process, never in the worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from freezer.hardware.cgroups import machine_bytes
from freezer.hardware.device_classes import device_class
from freezer.limits import Limits
from pipeline.records.class_facts import ClassFacts
from pipeline.worker.sandbox import Memory

PROBE_TIMEOUT_S = 120.0

MEMORY_SHARE = 0.8
"""Share of the machine's memory that one item may use if its entry sets no limit."""

_CHILD = "import sys, json; from pipeline.worker.probe import toolchain_of; print(json.dumps(toolchain_of(sys.argv[1])))"


def probe(name: str, num_threads: int) -> ClassFacts:
    """Return what this worker builds with.

    Args:
        name: device class; a GPU class adds the names of the driver and the GPU.
        num_threads: number of threads that the worker gives to items.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    command = [sys.executable, "-c", _CHILD, name]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # Ray extends the path of its workers alone
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the worker cannot be probed (exit code {done.returncode})\n{done.stderr[-4000:]}")
    memory = memory_limit(Limits(), cuda=device_class(name).kind == "cuda")
    return ClassFacts(num_threads=num_threads, toolchain=json.loads(done.stdout.splitlines()[-1]), memory_bytes=memory.limit_bytes)


def toolchain_of(name: str) -> dict[str, Any]:
    """Return the toolchain of a device class on this machine. Imports torch."""
    from freezer.freezing.target.target import target_here, toolchain

    return toolchain(target_here(name, 1).device) if device_class(name).kind == "cuda" else toolchain()


def memory_limit(limits: Limits, *, cuda: bool = False) -> Memory:
    """Return the memory that a child may use: the limit of the entry, or a share of the machine's memory."""
    asked = limits.memory_gb is not None
    limit_bytes = int(limits.memory_gb * 1e9) if limits.memory_gb is not None else int(machine_bytes() * MEMORY_SHARE)
    return Memory(limit_bytes=limit_bytes, asked=asked, bounds_requests=not cuda)
