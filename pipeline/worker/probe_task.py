"""The task that probes a worker. Imports no torch; the process that it starts does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from freezer.hardware import device_class
from freezer.spec import Limits
from pipeline.records import ClassFacts
from pipeline.worker.task_child import bounds_of

PROBE_TIMEOUT_S = 120.0

_PROBE = (
    "import sys, json; from pipeline.worker.probe_task import toolchain_of;"
    " print(json.dumps(toolchain_of(sys.argv[1])))"
)


def probe(name: str, num_threads: int) -> ClassFacts:
    """Return what this worker builds with.

    Args:
        name: device class; a GPU class adds the names of the driver and the GPU.
        num_threads: number of threads that the worker gives to items.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    command = [sys.executable, "-c", _PROBE, name]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # Ray extends the path of its workers alone
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the worker cannot be probed (exit code {done.returncode})\n{done.stderr[-4000:]}"
        )
    memory_bytes = bounds_of(Limits(), name).memory_bytes
    return ClassFacts(
        num_threads=num_threads,
        toolchain=json.loads(done.stdout.splitlines()[-1]),
        memory_bytes=memory_bytes,
    )


def toolchain_of(name: str) -> dict[str, Any]:
    """Return the toolchain of a device class on this machine. Imports torch."""
    from freezer.freezing.target import target_here, toolchain

    return (
        toolchain(target_here(name, 1).device) if device_class(name).kind == "cuda" else toolchain()
    )
