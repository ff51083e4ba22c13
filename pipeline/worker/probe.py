"""What torch says of itself, kept for each torch that is installed on this machine: importing it takes seconds, of every node of a
campaign that has nothing left to do.

    $XDG_CACHE_HOME/coldpress/torch/<which torch>.json       ~/.cache where XDG_CACHE_HOME is not set

It may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freezer.files.atomic import write_whole
from freezer.freezing.target.toolchain import toolchain_with
from freezer.hardware.cgroups import machine_bytes
from freezer.hardware.device_classes import device_class
from freezer.limits import Limits
from freezer.store.blob_cache import cache_folder
from pipeline.records.class_facts import ClassFacts
from pipeline.worker.sandbox import PROBE, Memory, run_isolated

PROBE_TIMEOUT_S = 120.0

MEMORY_SHARE = 0.8
"""Share of the machine's memory that one item may use when its entry sets no limit."""


FILES = ("version.py", "lib/libtorch_cpu.so", "lib/libtorch.so")
"""In torch's folder; another build of torch has others, by size or time."""


def known_versions() -> Mapping[str, str | None] | None:
    """What the torch that is installed said of itself (`torch_versions`); None where it is to be asked."""
    path = _path()
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes()) if path is not None else None
        if isinstance(found, dict) and found.keys() == {"torch", "onednn", "cuda"}:
            return found
    return None


def keep_versions(versions: Mapping[str, str | None]) -> None:
    """Keep what the torch that is installed says of itself, where that can be written."""
    path = _path()
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(versions).encode(), synced=False)


def _path() -> Path | None:
    """Where the versions of the torch that would be imported are kept; None where there is none, or it has no files of its own."""
    with contextlib.suppress(ImportError, ValueError, OSError, RuntimeError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            facts = [(name, stat.st_size, stat.st_mtime_ns) for name in FILES for stat in [(folder / name).stat()]]
            which = hashlib.sha256(repr((sys.version, str(folder), facts)).encode()).hexdigest()
            return cache_folder() / "torch" / f"{which}.json"
    return None


def probe(name: str, num_threads: int) -> ClassFacts:
    """What this worker builds with: as far as torch must be asked, from a child under the worker's own limits.

    Args:
        name: of the device class; one for GPUs has the driver's and the GPU's names too.
        num_threads: that the worker gives out.

    Raises:
        RuntimeError: torch cannot be imported there.
    """
    on_gpu = device_class(name).kind == "cuda"
    memory = memory_limit(Limits(), cuda=on_gpu)
    known = None if on_gpu else known_versions()
    if known is not None:
        return ClassFacts(num_threads=num_threads, toolchain=toolchain_with(known), memory_bytes=memory.limit_bytes)
    with tempfile.TemporaryDirectory(prefix=PROBE) as folder:
        work = Path(folder)
        end = run_isolated(_probe_child, (name,), folder=work, log=work / "log", timeout_s=PROBE_TIMEOUT_S, memory=memory)
    if end.failure is not None:
        raise RuntimeError(f"the worker cannot be probed: {end.failure.message}\n{end.failure.log_tail}")
    if not on_gpu:
        keep_versions({part: end.value[part] for part in ("torch", "onednn", "cuda")})
    return ClassFacts(num_threads=num_threads, toolchain=end.value, memory_bytes=memory.limit_bytes)


def _probe_child(name: str) -> Mapping[str, Any]:
    from freezer.freezing.target.target import target_here, toolchain

    return toolchain(target_here(name, 1).device) if device_class(name).kind == "cuda" else toolchain()


def memory_limit(limits: Limits, *, cuda: bool = False) -> Memory:
    """The memory that a child may use: the entry's limit, or a share of the machine's."""
    asked = limits.memory_gb is not None
    limit_bytes = int(limits.memory_gb * 1e9) if limits.memory_gb is not None else int(machine_bytes() * MEMORY_SHARE)
    return Memory(limit_bytes=limit_bytes, asked=asked, bounds_requests=not cuda)
