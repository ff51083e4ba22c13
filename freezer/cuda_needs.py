"""What an artifact for a GPU needs of the process that serves it, and why one is refused. Imports no torch.

capability   exactly the class's own: a kernel is made for one
runtime      of payloads that hold compiled kernels, at least the CUDA that compiled them, as of torch
driver       at least what that CUDA's major version needs; minor versions of CUDA run with any driver of their major
host         the CPU class of the code that starts the kernels

The reasons of refusals are `no_cuda`, `capability_mismatch`, `cuda_too_old`, `driver_too_old` and `host_mismatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from freezer.device_class import DEVICE_CLASSES, DeviceClass, Machine
from freezer.ladder import Refusal
from freezer.manifest import Manifest

_LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Linux drivers by CUDA's major version: NVIDIA's "CUDA Compatibility", minor version compatibility."""

_COMPILED = ("inductor",)
"""Kinds of payloads that hold kernels; the others have torch's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaHere:
    """What a process has to serve payloads for GPUs with.

    Attributes:
        devices: those that may serve, by torch's name, each with its compute capability, major * 10 + minor.
        runtime: the CUDA that torch is built with; None without.
        driver: version of the driver; None where NVML does not tell it.
        why_not: why there is no device; empty where there is one.
    """

    devices: tuple[tuple[str, int], ...] = ()
    runtime: str | None = None
    driver: str | None = None
    why_not: str = ""


def cuda_needs(made_for: DeviceClass, runtime: str | None) -> dict[str, Any]:
    """The manifest's `needs` of an artifact for a GPU; nothing for any other class.

    Args:
        made_for: its class.
        runtime: the CUDA that it was made with: `12.8`.
    """
    if made_for.kind != "cuda" or made_for.capability is None:
        return {}
    needs = {
        "capability": f"{made_for.capability // 10}.{made_for.capability % 10}",
        "runtime": runtime,
        "driver": least_driver(runtime),
        "host": made_for.host,
    }
    return {"cuda": needs}


def least_driver(runtime: str | None) -> str | None:
    """The oldest driver that runs what a CUDA made; None where that is not known."""
    return _LEAST_DRIVER.get(_version(runtime)[0]) if runtime else None


def refuse_by_cuda(manifest: Manifest, here: CudaHere) -> Refusal | None:
    """Why an artifact for a GPU does not serve in a process; None where it does, and of an artifact for a CPU.

    The reason is `no_cuda`, `capability_mismatch`, `cuda_too_old` or `driver_too_old`.
    """
    made_for = DEVICE_CLASSES[manifest.device_class]
    if made_for.kind != "cuda":
        return None
    needs: Mapping[str, Any] = manifest.needs.get("cuda") or {}

    def refused(reason: str, got: str, expected: str) -> Refusal:
        return Refusal(rung=manifest.device_class, reason=reason, got=got, expected=expected)

    if not here.devices:
        return refused("no_cuda", here.why_not or "no such GPU", f"a GPU of compute capability {needs.get('capability')}")
    if all(capability != made_for.capability for _, capability in here.devices):
        seen = ", ".join(f"{name} of {capability // 10}.{capability % 10}" for name, capability in here.devices)
        return refused("capability_mismatch", seen, f"a GPU of compute capability {needs.get('capability')}")
    runtime, driver = needs.get("runtime"), needs.get("driver")
    compiled = any(payload.kind in _COMPILED for payload in manifest.payloads)
    if compiled and runtime and _version(here.runtime) < _version(runtime):
        return refused("cuda_too_old", f"a torch for CUDA {here.runtime}", f"one for CUDA {runtime} or newer, which compiled it")
    if driver and here.driver and _version(here.driver) < _version(driver):
        return refused("driver_too_old", f"driver {here.driver}", f"driver {driver} or newer")
    return None


def out_of_reach(published: Iterable[str], machine: Machine) -> list[Refusal]:
    """The published classes for GPUs that a machine which has GPUs does not serve, each with the reason.

    They are no rungs, and `strict` does not raise for them: the machine is not of these classes. What it has instead is told.
    """
    own = [name for name in machine.classes if name.startswith("cuda-")]
    found = []
    for name in published:
        known = DEVICE_CLASSES.get(name)
        if known is None or known.kind != "cuda" or name in own:
            continue
        if name in machine.why_not:  # the GPU is of the class, and something else is not
            found.append(Refusal(rung=name, reason="host_mismatch", got=machine.why_not[name], expected=f"a CPU of {known.host}"))
        elif own:
            found.append(Refusal(rung=name, reason="capability_mismatch", got=", ".join(own), expected=name))
    return found


def _version(text: str | None) -> tuple[int, ...]:
    """A version's numbers; none of what is no version."""
    parts = (text or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())
