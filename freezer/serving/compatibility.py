"""Decide from JSON alone whether a machine or process can serve an artifact. Imports no torch.

`rungs` orders the published device classes; CHECKS lists the reasons against an artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from freezer.artifact import (
    ENGINES,
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    Manifest,
    Payload,
    PayloadKind,
    files_of,
    payloads_within,
    thread_counts_of,
    version_tuple,
)
from freezer.errors import Refusal, install_command
from freezer.hardware import DEVICE_CLASSES, Machine, can_run, cuda_version
from freezer.serving.process import LoadOptions, ServingProcess

COMPILED: tuple[PayloadKind, ...] = ("inductor",)
"""Kinds of payloads whose code calls libtorch, which promises little compatibility across versions:
with a newer torch than they were made with, the canary decides. The others open. None serves with
an older torch.
"""

WITHOUT_TORCH: tuple[PayloadKind, ...] = (*COMPILED, *ENGINES)
"""Kinds of payloads for CPUs that are called with arrays without torch in the process."""


Problem: TypeAlias = tuple[str, str, str]
"""A reason against an artifact: its code, what was found, and what the artifact needs."""


def refuse(
    rung: str,
    reason: str,
    got: str,
    expected: str,
) -> Refusal:
    """The refusal of a device class."""
    return Refusal(
        rung=rung,
        reason=reason,
        got=got,
        expected=expected,
    )


def rungs(
    published: Iterable[str],
    machine: Machine,
) -> list[str]:
    """The published device classes that a machine can run, most specific first; classes of newer
    releases are ignored.
    """
    order = list(machine.classes)
    runnable: list[str] = []
    for name in published:
        if name in DEVICE_CLASSES and any(can_run(name, served) for served in order):
            runnable.append(name)
    return sorted(runnable, key=lambda name: order.index(name) if name in order else len(order))


def refuse_by_class(
    name: str,
    published: Iterable[str],
    machine: Machine,
) -> Refusal:
    """Why a device class is not one of `rungs`."""
    got = f"a machine for {', '.join(machine.classes)}"
    kind = "cuda" if name.startswith("cuda-") else name
    why_not = machine.why_not.get(name) or machine.why_not.get(kind)
    if name not in published:
        got = f"only {', '.join(published) or 'nothing'} published"
    elif why_not:
        got += f" ({why_not})"
    return refuse(name, "class_mismatch", got, name)


def unserved_gpus(
    published: Iterable[str],
    machine: Machine,
) -> list[Refusal]:
    """Why a machine with GPUs does not serve the published classes for other GPUs; nothing for a
    machine without GPUs.
    """
    classes = ", ".join(name for name in machine.classes if name.startswith("cuda-"))
    refusals: list[Refusal] = []
    for name in published:
        known = DEVICE_CLASSES.get(name)
        if known is None or known.kind != "cuda" or name in machine.classes:
            continue
        # A GPU of the class, with a CPU that does not run its host code.
        why_not = machine.why_not.get(name)
        if why_not is not None:
            refusals.append(refuse(name, "host_mismatch", why_not, f"a CPU of {known.host}"))
        elif classes:
            refusals.append(refuse(name, "capability_mismatch", classes, name))
    return refusals


def _is_for_gpu(manifest: Manifest) -> bool:
    return DEVICE_CLASSES[manifest.device_class].kind == "cuda"


def _wrong_device(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """The artifact does not run on the requested device."""
    device = process.options.device
    if device is None or _is_for_gpu(manifest) == device.startswith("cuda"):
        return None
    kind = "GPU" if _is_for_gpu(manifest) else "CPU"
    return ("device_mismatch", f"an artifact for a {kind}", f"device {device}")


def _wrong_gpu(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """The artifact is for a GPU, and the process has none of its compute capability."""
    if not _is_for_gpu(manifest):
        return None
    assert manifest.needs.cuda is not None, "an artifact for a GPU has needs.cuda"
    expected = f"a GPU of compute capability {manifest.needs.cuda.capability}"
    here = process.cuda
    if not here.devices:
        return ("no_cuda", here.why_not or "no such GPU", expected)
    gpus: list[str] = []
    for name, capability in here.devices:
        if capability == DEVICE_CLASSES[manifest.device_class].capability:
            return None
        gpus.append(f"{name} of {capability // 10}.{capability % 10}")
    return ("capability_mismatch", ", ".join(gpus), expected)


def _old_cuda(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """The artifact is for a GPU, and needs a newer CUDA or driver."""
    needs = manifest.needs.cuda
    here = process.cuda
    if needs is None or not _is_for_gpu(manifest):
        return None
    # Payloads of other kinds use torch's own kernels.
    compiled = any(payload.kind == "inductor" for payload in manifest.payloads)
    if compiled and needs.runtime and cuda_version(here.runtime) < cuda_version(needs.runtime):
        got = f"a torch for CUDA {here.runtime}"
        return ("cuda_too_old", got, f"a torch for CUDA {needs.runtime} or newer")
    if needs.driver and here.driver and cuda_version(here.driver) < cuda_version(needs.driver):
        got = f"driver {here.driver}"
        return ("driver_too_old", got, f"driver {needs.driver} or newer")
    return None


def _wrong_torch(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """A torch is missing, older than the payloads, or newer and no canary checks it."""
    opened = payloads_of(manifest, process.options)
    if process.options.as_numpy and all(payload.kind in ENGINES for payload in opened):
        return None
    if not process.torch_version:
        kinds = " and ".join(sorted({payload.kind for payload in opened}))
        remedy = install_command("torch", torch=manifest.needs.torch)
        return ("runtime_missing", "torch not installed", f"torch for {kinds} ({remedy})")
    here = version_tuple(process.torch_version)
    made = version_tuple(manifest.needs.torch)
    got = f"torch {process.torch_version}"
    if here < made:
        return ("torch_too_old", got, f"torch >= {manifest.needs.torch}")
    unsure = any(payload.kind in COMPILED for payload in opened)
    if here == made or process.options.canary or not unsure:
        return None
    expected = f"torch {manifest.needs.torch}, or load(..., canary=True)"
    return ("torch_untried", f"{got}, and no canary", expected)


def _wrong_engine(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """An engine is missing, or older than the payloads. The manifests of payloads made by hand may
    lack the versions.
    """
    installed = process.engines
    engines, needed = manifest.engines, manifest.needs.packages
    expected = f"{' and '.join(engines)} ({install_command(*engines, **needed)})"
    missing = [engine for engine in engines if engine not in installed]
    if missing:
        return ("runtime_missing", f"{' and '.join(missing)} not installed", expected)
    for engine, least in needed.items():
        if version_tuple(installed[engine]) < version_tuple(least):
            return ("runtime_too_old", f"{engine} {installed[engine]}", expected)
    return None


def _too_few_threads(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """All payloads are made for more threads than calls may use."""
    num_threads = process.num_threads
    if payloads_within(manifest.payloads, num_threads):
        return None
    counts = thread_counts_of(manifest.payloads)
    got = f"{num_threads} threads"
    expected = " or ".join(map(str, counts))
    remedy = f"load(..., threads=N), or freeze it for `threads: {[num_threads, *counts]}`"
    return ("threads_mismatch", got, f"{expected} ({remedy})")


def _wrong_layout(
    manifest: Manifest,
    process: ServingProcess,
) -> Problem | None:
    """Packed weights would be much slower than judged, because oneDNN expects another layout, also
    under the limits that `limit_isa` allows.
    """
    limits = DEVICE_CLASSES[manifest.device_class].limits
    machine = process.machine()
    allowed = process.machine(limits) if process.options.limit_isa else machine
    wanted = _layouts(manifest)
    if machine.serves(wanted) or allowed.serves(wanted):
        return None
    here = {dtype: allowed.layouts.get(dtype, "nothing") for dtype in wanted}
    got = f"oneDNN packing for {_by_dtype(here)} here"
    if allowed.limits:
        got += f" under {allowed.limits}"
    expected = f"weights packed for {_by_dtype(wanted)}"
    if limits:
        variables = " ".join(f"{name}={value}" for name, value in limits.items())
        expected += (
            f" ({variables} before torch's first operation; load(..., limit_isa=True) sets it)"
        )
    return ("isa_mismatch", got, expected)


CHECKS: tuple[Callable[[Manifest, ServingProcess], Problem | None], ...] = (
    _wrong_device,
    _wrong_gpu,
    _old_cuda,
    _wrong_torch,
    _wrong_engine,
    _too_few_threads,
    _wrong_layout,
)
"""The reasons against an artifact, in the order in which they are reported."""


def refusal_of(
    manifest: Manifest,
    process: ServingProcess,
) -> Refusal | None:
    """The first reason against an artifact in a process; None where it serves."""
    manifest = replace(manifest, payloads=payloads_of(manifest, process.options))
    for check in CHECKS:
        problem = check(manifest, process)
        if problem is not None:
            return refuse(manifest.device_class, *problem)
    return None


def limits_for(manifest: Manifest, process: ServingProcess) -> Mapping[str, str]:
    """Environment variables that limit oneDNN as packed weights require; empty where it need not
    be limited.
    """
    if process.machine().serves(_layouts(manifest)):
        return {}
    return DEVICE_CLASSES[manifest.device_class].limits


def runs_without_torch(manifest: Manifest, options: LoadOptions) -> bool:
    """Whether a load opens payloads without torch in the process."""
    return options.as_numpy and bool(_payloads_without_torch(manifest))


def payloads_of(manifest: Manifest, options: LoadOptions) -> tuple[Payload, ...]:
    """The payloads that a load may open: for arrays only those that need no torch in the process,
    where there are some.
    """
    few = _payloads_without_torch(manifest) if options.as_numpy else ()
    return few or manifest.payloads


def _payloads_without_torch(manifest: Manifest) -> tuple[Payload, ...]:
    if _is_for_gpu(manifest) or manifest.recipe.preserve:
        return ()
    return tuple(payload for payload in manifest.payloads if payload.kind in WITHOUT_TORCH)


def needed_files(
    manifest: Manifest,
    num_threads: int,
    options: LoadOptions,
) -> tuple[tuple[Payload, ...], list[str]]:
    """The payloads that a load with this many threads opens, and the paths of all files that it
    reads.
    """
    opened = payloads_within(payloads_of(manifest, options), num_threads)
    golden = (GOLDEN_INPUTS, GOLDEN_OUTPUTS) if options.canary else ()
    return opened, [*(file.path for file in files_of(opened)), *golden]


def _layouts(manifest: Manifest) -> dict[str, str]:
    """The layouts of packed weights by dtype. Where a manifest records none, payloads for a thread
    count were packed, in float32.
    """
    made_for = DEVICE_CLASSES[manifest.device_class]
    wanted: dict[str, str] = {}
    for payload in manifest.payloads:
        if payload.layouts is not None:
            wanted |= payload.layouts
        elif payload.num_threads is not None and made_for.kind == "cpu":
            wanted["float32"] = made_for.layouts["float32"]
    return wanted


def _by_dtype(layouts: Mapping[str, str]) -> str:
    return ", ".join(f"{layout} ({dtype})" for dtype, layout in layouts.items())
