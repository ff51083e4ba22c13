"""Diagnose a slow artifact: differences between this process and machine and those of the judge."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from freezer.artifact.manifest import Manifest
from freezer.errors import SpeedCheck
from freezer.hardware.cgroups import available_cpus, cpu_quota
from freezer.hardware.device_classes import device_class
from freezer.runtime.devices import host_fingerprint

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
)

_ISA = re.compile(r"^onednn_verbose,.*\bcpu,isa:(.+)$", re.MULTILINE)


def causes(manifest: Manifest, portable: Manifest, timed: SpeedCheck, serve: Callable[[], Any]) -> tuple[str, ...]:
    """List the differences, the most likely cause first.

    Args:
        manifest, portable: of the timed artifacts.
        timed: the measurement.
        serve: makes one call of the artifact.
    """
    judged: Mapping[str, Any] = manifest.provenance.get("host") or {}
    return (
        *_isa(manifest, judged, serve),
        *_threads(manifest, judged, timed.num_threads),
        *_changed(("LD_PRELOAD",), judged, "allocator and OpenMP runtime"),
        *_load(timed),
        *_machine(manifest, portable, judged),
    )


def _isa(manifest: Manifest, judged: Mapping[str, Any], serve: Callable[[], Any]) -> Iterator[str]:
    """Limits of the instruction set, in the environment and in oneDNN."""
    yield from _changed(ISA_VARIABLES, judged, "ISA limit")
    isa, packed_for = onednn_isa(serve), device_class(manifest.device_class).limits.get("ONEDNN_MAX_CPU_ISA")
    if isa and packed_for and _family(isa) != _family(packed_for):
        yield f"ISA limit: oneDNN uses {isa} in this process, and the weights are packed for {packed_for}"


def _family(isa: str) -> str:
    """Instruction set of oneDNN's name: AVX512 for `Intel AVX-512 with DL Boost`, `AVX512_CORE_VNNI` and AVX10."""
    plain = isa.upper().replace("-", "").replace("AVX10", "AVX512")
    return next((family for family in ("AVX512", "AVX2", "AVX", "SSE4") if family in plain), plain)


def onednn_isa(serve: Callable[[], Any]) -> str | None:
    """The instruction set that oneDNN uses in this process, possibly under a limit that was set before torch was imported.

    oneDNN prints it in a call, to stdout of the process, which is redirected to a file meanwhile.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        stdout = os.dup(1)
        libc.fflush(None)
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                serve()
        finally:
            libc.fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        text = file.read().decode(errors="replace")
    found = _ISA.search(text)
    return found.group(1) if found else None


def _threads(manifest: Manifest, judged: Mapping[str, Any], num_threads: int) -> Iterator[str]:
    latency = manifest.latency
    counts = {latency.num_threads, *(cell.num_threads for cell in latency.points)} if latency else set()
    if num_threads not in counts:
        yield f"threads: {num_threads} here, {' or '.join(str(count) for count in counts)} where it was judged"
    allowed = len(os.sched_getaffinity(0))
    if allowed < num_threads:
        yield f"threads: {num_threads} share the {allowed} CPUs of this process's affinity"
    quota = cpu_quota()
    if quota is not None and quota < num_threads:
        yield f"threads: {num_threads} share a quota of {quota:g} CPUs, set by this process's control group"
    yield from _changed(THREAD_VARIABLES, judged, "threads")


def _load(timed: SpeedCheck) -> Iterator[str]:
    if timed.num_dropped:
        load, total = os.getloadavg()[0], timed.num_rounds + timed.num_dropped
        yield f"load: others disturbed {timed.num_dropped} of {total} rounds (load {load:.1f} on {available_cpus()} CPUs)"


def _machine(manifest: Manifest, portable: Manifest, judged: Mapping[str, Any]) -> Iterator[str]:
    here, made_with = host_fingerprint(), manifest.toolchain.get("torch")
    if made_with != torch.__version__:
        yield f"torch: {torch.__version__} here, {made_with} where it was made"
    if judged.get("cpu") and judged["cpu"] != here["cpu"]:
        yield f"CPU: {here['cpu']} here, {judged['cpu']} where it was judged"
    best, there = here["classes"][0], next(iter(judged.get("classes") or ()), None)
    if there and best != there:
        yield f"class: this process runs {best} at best, the judge's ran {there}"
    other = portable.provenance.get("host") or {}
    counts = {item.latency.num_threads if item.latency else None for item in (manifest, portable)}
    if other.get("cpu") != judged.get("cpu") or len(counts) > 1:
        yield "expectation: the portable artifact was judged on another CPU or with another thread count than this one"


def _changed(names: tuple[str, ...], judged: Mapping[str, Any], topic: str) -> Iterator[str]:
    """Variables whose values here differ from those that the manifest records."""
    there: Mapping[str, str] = judged.get("environment") or {}
    for name in names:
        if os.environ.get(name) != there.get(name):
            recorded = f"{_setting(name, there[name])} where it was judged" if name in there else "none in the manifest"
            yield f"{topic}: {_setting(name, os.environ.get(name))} here, {recorded}"


def _setting(name: str, value: str | None) -> str:
    return f"{name} unset" if value is None else f"{name}={value}"
