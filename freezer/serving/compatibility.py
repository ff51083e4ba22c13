"""Decide from JSON alone whether a machine or process can serve an artifact. Imports no torch.

`rungs` orders the published device classes; each `refuse_by_...` returns why an artifact is
refused, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from freezer.artifact import Manifest, Payload, PayloadKind, counts_of, set_within, version_tuple
from freezer.errors import Refusal
from freezer.hardware import DEVICE_CLASSES, CudaHere, DeviceClass, Machine, can_run, cuda_version

NEWER_TORCH: Mapping[PayloadKind, Literal["opens", "canary decides"]] = {
    # its code calls libtorch, which promises little compatibility across versions
    "inductor": "canary decides",
    "torchscript": "opens",
    "exported": "opens",
    "onnxruntime": "opens",
    "openvino": "opens",
}
"""Whether a payload serves with a newer torch than it was made with, by kind.

None serves with an older torch.
"""


def rungs(published: Iterable[str], machine: Machine) -> list[str]:
    """The published device classes that a machine can run, most specific first; classes of newer
    releases are ignored.
    """
    known = [name for name in published if name in DEVICE_CLASSES]
    runnable = [name for name in known if any(can_run(name, own) for own in machine.classes)]
    order = list(machine.classes)
    return sorted(runnable, key=lambda name: order.index(name) if name in order else len(order))


def refuse_by_class(name: str, published: Iterable[str], machine: Machine) -> Refusal:
    """Why a device class is not one of `rungs`."""
    if name not in published:
        return Refusal(
            rung=name,
            reason="class_mismatch",
            got=f"only {', '.join(published) or 'nothing'} published",
            expected=name,
        )
    why_not = machine.why_not.get(name) or (
        machine.why_not.get("cuda") if name.startswith("cuda-") else None
    )
    got = f"a machine for {', '.join(machine.classes)}" + (f" ({why_not})" if why_not else "")
    return Refusal(rung=name, reason="class_mismatch", got=got, expected=name)


def unserved_gpus(published: Iterable[str], machine: Machine) -> list[Refusal]:
    """Why a machine with GPUs does not serve the published classes for other GPUs; nothing for a
    machine without GPUs.
    """
    own = [name for name in machine.classes if name.startswith("cuda-")]
    found = []
    for name in published:
        known = DEVICE_CLASSES.get(name)
        if known is None or known.kind != "cuda" or name in own:
            continue
        if (
            name in machine.why_not
        ):  # a GPU of the class, with a CPU that does not run its host code
            found.append(
                Refusal(
                    rung=name,
                    reason="host_mismatch",
                    got=machine.why_not[name],
                    expected=f"a CPU of {known.host}",
                )
            )
        elif own:
            found.append(
                Refusal(rung=name, reason="capability_mismatch", got=", ".join(own), expected=name)
            )
    return found


def refuse_by_version(name: str, number: int) -> Refusal:
    """The refusal of a device class that only version `number` has, which is older than the
    requested one.
    """
    expected = f"it in this version (freeze it again, or load version {number})"
    return Refusal(
        rung=name, reason="older_version", got=f"only version {number} has it", expected=expected
    )


def refuse_by_device(manifest: Manifest, device: str | None) -> Refusal | None:
    """Why an artifact does not run on the requested device; None where it does, or no device was
    requested.
    """
    kind = DEVICE_CLASSES[manifest.device_class].kind
    if device is None or (kind == "cuda") == device.startswith("cuda"):
        return None
    got = f"an artifact for a {'GPU' if kind == 'cuda' else 'CPU'}"
    return _refusal(manifest, "device_mismatch", got, f"device {device}")


def refuse_by_cuda(manifest: Manifest, here: CudaHere) -> Refusal | None:
    """Why an artifact for a GPU does not serve; None where it does, and for an artifact for a CPU.

    The reason is `no_cuda`, `capability_mismatch`, `cuda_too_old` or `driver_too_old`.
    """
    made_for = DEVICE_CLASSES[manifest.device_class]
    if made_for.kind != "cuda":
        return None
    needs = manifest.needs.cuda
    assert needs is not None, "an artifact for a GPU has needs.cuda"

    if not here.devices:
        return _refusal(
            manifest,
            "no_cuda",
            here.why_not or "no such GPU",
            f"a GPU of compute capability {needs.capability}",
        )
    if all(capability != made_for.capability for _, capability in here.devices):
        seen = ", ".join(
            f"{name} of {capability // 10}.{capability % 10}" for name, capability in here.devices
        )
        return _refusal(
            manifest, "capability_mismatch", seen, f"a GPU of compute capability {needs.capability}"
        )
    runtime, driver = needs.runtime, needs.driver
    compiled = any(
        payload.kind == "inductor" for payload in manifest.payloads
    )  # other kinds use torch's own kernels
    if compiled and runtime and cuda_version(here.runtime) < cuda_version(runtime):
        return _refusal(
            manifest,
            "cuda_too_old",
            f"a torch for CUDA {here.runtime}",
            f"a torch for CUDA {runtime} or newer",
        )
    if driver and here.driver and cuda_version(here.driver) < cuda_version(driver):
        return _refusal(
            manifest, "driver_too_old", f"driver {here.driver}", f"driver {driver} or newer"
        )
    return None


def refuse_by_torch(
    manifest: Manifest, torch_version: str, *, canary: bool = True
) -> Refusal | None:
    """Why a torch version does not open the payloads: it is older than theirs, or newer and no
    canary will check it.
    """
    here, made = version_tuple(torch_version), version_tuple(manifest.needs.torch)
    if here < made:
        return _refusal(
            manifest, "torch_too_old", f"torch {torch_version}", f"torch >= {manifest.needs.torch}"
        )
    if (
        here > made
        and not canary
        and any(NEWER_TORCH[payload.kind] == "canary decides" for payload in manifest.payloads)
    ):
        expected = f"torch {manifest.needs.torch}, or load(..., canary=True)"
        return _refusal(
            manifest, "torch_untried", f"torch {torch_version}, and no canary", expected
        )
    return None


def refuse_by_engine(manifest: Manifest, installed: Mapping[str, str]) -> Refusal | None:
    """Why an artifact does not serve with the installed engines: one is missing, or older than the
    payloads.

    Args:
        manifest: of the artifact. Those of payloads made by hand may lack the versions.
        installed: versions by package.
    """
    missing = [engine for engine in manifest.engines if engine not in installed]
    if missing:
        expected = f"{' and '.join(missing)} (pip install 'coldpress[{','.join(missing)}]')"
        return _refusal(
            manifest, "runtime_missing", f"{' and '.join(missing)} not installed", expected
        )
    for engine, least in manifest.needs.packages.items():
        if version_tuple(installed[engine]) < version_tuple(least):
            expected = f"{engine} >= {least} (pip install --upgrade {engine})"
            return _refusal(manifest, "runtime_too_old", f"{engine} {installed[engine]}", expected)
    return None


def native_payloads(manifest: Manifest) -> tuple[Payload, ...]:
    """The payloads that the native runtime opens."""
    return tuple(payload for payload in manifest.payloads if payload.kind == "inductor")


def refuse_by_runtime(manifest: Manifest) -> Refusal | None:
    """Why the native runtime does not serve an artifact; None where it does."""
    got = None
    dtypes = {item.name: item.dtype for item in manifest.inputs.tensors} | {
        item.name: item.dtype for item in manifest.outputs
    }
    odd = [name for name, dtype in dtypes.items() if dtype == "bfloat16"]
    if DEVICE_CLASSES[manifest.device_class].kind == "cuda":
        got = "an artifact for a GPU"
    elif not native_payloads(manifest):
        got = (
            f"payloads of {' and '.join(sorted({payload.kind for payload in manifest.payloads}))}"
            " only"
        )
    elif manifest.stateful or manifest.recipe.preserve:
        got = "a model with state, or with preserved names"
    elif odd:
        got = f"bfloat16, which numpy lacks, in {', '.join(odd)}"
    expected = (
        "Inductor payloads for CPUs, as the native runtime serves no others; load(...,"
        " runtime='torch')"
    )
    return None if got is None else _refusal(manifest, "not_native", got, expected)


def refuse_by_threads(manifest: Manifest, num_threads: int) -> Refusal | None:
    """Why no payload serves a process that may use `num_threads`: all are made for more.

    None where one does.
    """
    if set_within(manifest.payloads, num_threads):
        return None
    counts = counts_of(manifest.payloads)
    remedy, why = (
        f"load(..., threads=N), or freeze it for `threads: {[*reversed(counts), num_threads]}`",
        "",
    )
    dropped = next(
        (item for item in manifest.freezing.dropped if item.num_threads <= num_threads), None
    )
    if dropped is not None:
        remedy, why = (
            "load(..., threads=N)",
            f" (the payload for {dropped.num_threads} was dropped: {dropped.reason})",
        )
    expected = f"{' or '.join(map(str, counts))} ({remedy})"
    return _refusal(
        manifest,
        "threads_mismatch",
        f"{num_threads} thread{'s' if num_threads > 1 else ''}{why}",
        expected,
    )


def refuse_by_isa(manifest: Manifest, machine: Machine) -> Refusal | None:
    """Why packed weights would be much slower than judged: oneDNN expects another layout.

    None where it expects theirs.
    """
    made = DEVICE_CLASSES[manifest.device_class]
    wanted: dict[str, str] = {}
    for payload in manifest.payloads:
        wanted |= _unrecorded_layouts(payload, made) if payload.layouts is None else payload.layouts
    if machine.serves(wanted):
        return None
    wrong = {
        dtype: layout for dtype, layout in wanted.items() if machine.layouts.get(dtype) != layout
    }
    limits = " ".join(f"{name}={value}" for name, value in made.limits.items())
    remedy = (
        f" ({limits} before torch's first operation; load(..., limit_isa=True) sets it)"
        if limits
        else ""
    )
    here = _by_dtype({dtype: machine.layouts.get(dtype, "nothing") for dtype in wrong})
    got = f"oneDNN packing for {here} here" + (f" under {machine.limits}" if machine.limits else "")
    return _refusal(manifest, "isa_mismatch", got, f"weights packed for {_by_dtype(wrong)}{remedy}")


def _refusal(manifest: Manifest, reason: str, got: str, expected: str) -> Refusal:
    return Refusal(rung=manifest.device_class, reason=reason, got=got, expected=expected)


def _unrecorded_layouts(payload: Payload, made: DeviceClass) -> Mapping[str, str]:
    """Layouts for a manifest that records none: payloads for a thread count were packed, in
    float32.
    """
    return (
        {"float32": made.layouts["float32"]}
        if payload.num_threads is not None and made.kind == "cpu"
        else {}
    )


def _by_dtype(layouts: Mapping[str, str]) -> str:
    return ", ".join(f"{layout} ({dtype})" for dtype, layout in layouts.items())
