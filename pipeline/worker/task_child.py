"""Run the heavy half of a task in a child, with the limits of its entry; and the task that probes a
worker.

Imports no torch; the processes that it starts do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freezer.files import scratch_folder
from freezer.hardware import device_class, machine_bytes, this_host
from freezer.spec import Limits
from pipeline.catalog import Entry
from pipeline.records import ClassFacts
from pipeline.worker.child import End
from pipeline.worker.requests import BuildRequest, JudgeRequest
from pipeline.worker.sandbox import run_isolated
from pipeline.worker.supervisor import Bounds

if TYPE_CHECKING:
    from freezer.freezing.models import Subject
    from freezer.freezing.target import Target

_MEMORY_SHARE = 0.8
"""Share of the machine's memory that one item may use if its entry sets no limit."""

LOG = "child.log"
"""File of a staging folder with the output of its child."""


def in_child(
    child: Callable[..., object],
    request: BuildRequest | JudgeRequest,
    staging: Path,
    *args: object,
) -> End:
    """Run a child in a staging folder, where its output is appended to LOG."""
    return run_isolated(
        child,
        (request, staging, *args),
        folder=staging,
        log=staging / LOG,
        bounds=bounds_of(request.entry.limits, request.device_class),
    )


def bounds_of(limits: Limits, name: str) -> Bounds:
    """Return the limits of a child: those of the entry, and by default a share of the machine's
    memory.
    """
    memory_bytes = machine_bytes() * _MEMORY_SHARE
    if limits.memory_gb is not None:
        memory_bytes = limits.memory_gb * 1e9
    return Bounds(
        timeout_s=limits.timeout_s,
        memory_bytes=int(memory_bytes),
        asked=limits.memory_gb is not None,
        bounds_requests=device_class(name).kind != "cuda",
    )


def load_subject(entry: Entry, target: Target | None = None) -> Subject:
    """Return the subject of an entry, on the device of the target if given; see
    `freezer.freezing.freeze.load_subject`.
    """
    from freezer.freezing.freeze import load_subject as load
    from freezer.freezing.models import SubjectOptions
    from freezer.runtime.devices import CPU

    options = SubjectOptions(
        preserve=entry.preserve,
        reset=entry.reset,
        points=entry.points,
        fill_up=entry.fill_up,
        device=target.device if target else CPU,
        accuracy=entry.accuracy,
    )
    return load(
        entry.source,
        entry.name,
        entry.spec,
        Path(entry.samples) if entry.samples else None,
        options,
    )


PROBE_TIMEOUT_S = 120.0


def probe(name: str, num_threads: int) -> ClassFacts:
    """Return what this worker builds with.

    Args:
        name: device class; a GPU class adds the names of the driver and the GPU.
        num_threads: number of threads that the worker gives to items.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    bounds = bounds_of(Limits(timeout_s=PROBE_TIMEOUT_S), name)
    with scratch_folder() as folder:
        staging = Path(folder)
        end = run_isolated(
            toolchain_of,
            (name,),
            folder=staging,
            log=staging / LOG,
            bounds=bounds,
        )
    if end.failure is not None:
        message = f"the worker cannot be probed: {end.failure.message}\n{end.failure.log_tail}"
        raise RuntimeError(message)
    return ClassFacts(
        num_threads=num_threads,
        toolchain=end.value,
        memory_bytes=bounds.memory_bytes,
        emulated=this_host().emulated,
    )


def toolchain_of(name: str) -> dict[str, Any]:
    """Return the toolchain of a device class on this machine. Imports torch."""
    from freezer.freezing.target import target_here, toolchain

    is_cuda = device_class(name).kind == "cuda"
    return toolchain(target_here(name, 1).device) if is_cuda else toolchain()
