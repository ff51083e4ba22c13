"""Why an artifact may be slow here: what of this process and machine is not as it was where the artifact was judged."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from freezer.artifact.manifest import Manifest
from freezer.hardware.cgroups import available_cpus, cpu_quota
from freezer.hardware.device_classes import device_class
from freezer.runtime.fingerprint import host_fingerprint

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
)
PRELOAD = "LD_PRELOAD"
MAX_KERNELS = 6
"""Of one call, that a message lists."""

_ISA = re.compile(r"^onednn_verbose,.*\bcpu,isa:(.+)$", re.MULTILINE)
_EXECUTED = re.compile(r"^onednn_verbose,.*?\bexec,cpu,(\w+),([^,]+),", re.MULTILINE)


def causes(
    manifest: Manifest,
    portable: Manifest,
    num_threads: int,
    serve: Callable[[], Any],
    *,
    num_rounds: int,
    num_dropped: int,
) -> tuple[str, ...]:
    """What differs here, in sentences, the likeliest first.

    Args:
        manifest, portable: of what was timed.
        num_threads: that it was timed with.
        serve: makes one call of the artifact, which is watched.
        num_rounds, num_dropped: of the sampling.
    """
    judged: Mapping[str, Any] = manifest.provenance.get("host") or {}
    here = host_fingerprint()
    return (
        *_isa(manifest, judged, serve),
        *_threads(manifest, judged, num_threads),
        *_preloads(judged),
        *_load(num_rounds, num_dropped),
        *_machine(manifest, portable, judged, here),
    )


def _isa(manifest: Manifest, judged: Mapping[str, Any], serve: Callable[[], Any]) -> Iterator[str]:
    """Limits of the instruction set: as the environment has them, as the process was started with, and as oneDNN says."""
    yield from _changed(ISA_VARIABLES, judged, "ISA limit")
    started = _environment_at_start()
    for name in ISA_VARIABLES:
        if started.get(name) != os.environ.get(name):
            now = os.environ.get(name)
            yield (
                f"ISA limit: the process was started with {_setting(name, started.get(name))}; {_setting(name, now)} now, but a "
                "library keeps what it read first"
            )
    isa, kernels = onednn_says(serve)
    packed_for = device_class(manifest.device_class).limits.get("ONEDNN_MAX_CPU_ISA")
    if isa and packed_for and _family(isa) != _family(packed_for):
        used = sorted(kernels, key=lambda name: -kernels[name])[:MAX_KERNELS]
        yield (
            f"ISA limit: oneDNN uses {isa} in this process, and the weights are packed for {packed_for}; a call runs "
            f"{', '.join(f'{kernels[name]} {name}' for name in used) or 'no kernel of oneDNN'}"
        )


def _family(isa: str) -> str:
    """Which instructions one of oneDNN's names stands for, `Intel AVX-512 with DL Boost` as `AVX512_CORE_VNNI` does."""
    plain = isa.upper().replace("-", "")
    return next((family for family in ("AVX512", "AVX10", "AVX2", "AVX", "SSE4") if family in plain), plain).replace(
        "AVX10", "AVX512"
    )


def onednn_says(serve: Callable[[], Any]) -> tuple[str | None, dict[str, int]]:
    """The instruction set that oneDNN uses in this process, and the kernels of one call, each with its count.

    oneDNN prints both to the process's own stdout, which goes to a file meanwhile.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        libc.fflush(None)
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                serve()
        finally:
            libc.fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        text = file.read().decode(errors="replace")
    found = _ISA.search(text)
    kernels: dict[str, int] = {}
    for kind, name in _EXECUTED.findall(text):
        kernels[f"{kind} {name}"] = kernels.get(f"{kind} {name}", 0) + 1
    return found.group(1) if found else None, kernels


def _threads(manifest: Manifest, judged: Mapping[str, Any], num_threads: int) -> Iterator[str]:
    latency = manifest.latency
    counts = {latency.num_threads, *(cell.num_threads for cell in latency.points)} if latency else set()
    if num_threads not in counts:
        yield f"threads: {num_threads} here, {' or '.join(str(count) for count in counts)} where it was judged"
    allowed = len(os.sched_getaffinity(0))
    if allowed < num_threads:
        yield f"threads: {num_threads} share {allowed} CPUs, which is all that the affinity of this process allows"
    quota = cpu_quota()
    if quota is not None and quota < num_threads:
        yield f"threads: {num_threads} share a quota of {quota:g} CPUs, which the control group of this process sets"
    yield from _changed(THREAD_VARIABLES, judged, "threads")


def _preloads(judged: Mapping[str, Any]) -> Iterator[str]:
    """Allocators and OpenMP runtimes, which are chosen by preloading them."""
    yield from _changed((PRELOAD,), judged, "allocator and OpenMP runtime")


def _load(num_rounds: int, num_dropped: int) -> Iterator[str]:
    if num_dropped:
        load, cpus = os.getloadavg()[0], available_cpus()
        yield f"load: others disturbed {num_dropped} of {num_rounds + num_dropped} rounds (load {load:.1f} on {cpus} CPUs)"


def _machine(manifest: Manifest, portable: Manifest, judged: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    made_with = manifest.toolchain.get("torch")
    if made_with != torch.__version__:
        yield f"torch: {torch.__version__} here, {made_with} where it was made"
    if judged.get("cpu") and judged["cpu"] != here["cpu"]:
        yield f"CPU: {here['cpu']} here, {judged['cpu']} where it was judged"
    best, there = here["classes"][0], next(iter(judged.get("classes") or ()), None)
    if there and best != there:
        yield f"class: this process runs {best} at best, that of its judge {there}"
    other = portable.provenance.get("host") or {}
    counts = {item.latency.num_threads if item.latency else None for item in (manifest, portable)}
    if other.get("cpu") != judged.get("cpu") or len(counts) > 1:
        yield "expectation: the portable artifact was judged on another CPU or with another thread count than this one"


def _changed(names: tuple[str, ...], judged: Mapping[str, Any], what: str) -> Iterator[str]:
    """Variables that have another value here than where the artifact was judged, as far as the manifest records them."""
    there: Mapping[str, str] = judged.get("environment") or {}
    for name in names:
        if os.environ.get(name) != there.get(name):
            recorded = f"{_setting(name, there[name])} where it was judged" if name in there else "none in the manifest"
            yield f"{what}: {_setting(name, os.environ.get(name))} here, {recorded}"


def _setting(name: str, value: str | None) -> str:
    return f"{name} unset" if value is None else f"{name}={value}"


def _environment_at_start() -> dict[str, str]:
    """The environment that the process was started with, which may have been changed since."""
    pairs = (pair.partition("=") for pair in Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals}
