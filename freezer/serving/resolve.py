"""Resolve a reference to the published artifacts that this machine could run, most specific first."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, MANIFEST, Artifact, folder_of
from freezer.artifact.manifest import FileRef, Manifest, Payload
from freezer.artifact.payload_selection import set_within
from freezer.artifact.signatures import Signatures, problem_of
from freezer.errors import IncompatibleError, IntegrityError, Refusal, UsageError
from freezer.hardware.cgroups import thread_budget
from freezer.hardware.device_classes import device_class as class_named
from freezer.hardware.machine import detect
from freezer.runtime.cuda import cuda_here
from freezer.runtime.threads import own_count
from freezer.serving.compatibility import out_of_reach, refuse_by_cuda, refuse_by_isa, refuse_by_threads, refuse_by_torch, rungs
from freezer.store.store import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey


@dataclass(frozen=True, slots=True)
class Rung:
    """A published artifact that this machine could run. What it calls raises IntegrityError.

    Attributes:
        name: of the device class.
        manifest: reads its manifest.
        signatures: reads what vouches for it, and manifest.json byte for byte.
        fetch: gives its files; of some paths alone, where they are named.
    """

    name: str
    manifest: Callable[[], Manifest]
    signatures: Callable[[], tuple[Signatures | None, bytes]]
    fetch: Callable[[Collection[str] | None], Artifact]


def budget_here(threads: int | None) -> int:
    """The threads that calls may use: those that were asked for, or what torch and the CPUs of this process leave.

    Raises:
        UsageError: less than one was asked for.
    """
    if threads is None:
        return thread_budget(own_count())
    if threads < 1:
        raise UsageError(f"got threads={threads}, expected at least 1, or None for as many as this process may use")
    return threads


def find_rungs(reference: str | Path, store: str | None, wanted: str, stack: ExitStack) -> Iterator[Rung]:
    """The rungs to try, most specific first. Reads JSON only."""
    folder = folder_of(reference)
    if folder is not None:
        artifact = Artifact.read(folder)
        if wanted not in ("auto", artifact.manifest.device_class):
            raise IncompatibleError(f"{folder} is made for {artifact.manifest.device_class}, not for {wanted}")
        if not rungs([artifact.manifest.device_class], detect()):
            raise IncompatibleError(
                f"{folder} is made for {artifact.manifest.device_class}; this machine runs {', '.join(detect().classes)}"
                f"{_why_not(artifact.manifest.device_class)}",
                [_not_of_this_machine(artifact.manifest.device_class)],
            )

        def own() -> tuple[Signatures | None, bytes]:
            data = (artifact.folder / MANIFEST).read_bytes()
            if Manifest.from_bytes(data, origin=str(folder)) != artifact.manifest:
                raise IntegrityError(f"{folder / MANIFEST} was changed while it was read; pull the artifact again")
            return Signatures.read(artifact.folder), data

        yield Rung(artifact.manifest.device_class, lambda: artifact.manifest, own, lambda _: artifact)
        return
    opened = Store.open(store or "store")
    version = opened.version(str(reference))
    names = rungs(version.images, detect())
    if wanted != "auto":
        class_named(wanted)
        if wanted not in names:
            raise IncompatibleError(
                f"{reference}: {wanted} is not published, or not for this machine; here are {', '.join(names) or 'none'}"
                f"{_why_not(wanted)}",
                [_not_of_this_machine(wanted)],
            )
        names = [wanted]
    for name in names:

        def fetch(paths: Collection[str] | None, name: str = name) -> Artifact:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="coldpress-"))
            return opened.materialize(version, name, Path(scratch), paths=paths)

        def signatures(name: str = name) -> tuple[Signatures | None, bytes]:
            return opened.signatures(version, name), opened.manifest_bytes(version, name)

        yield Rung(name, partial(opened.manifest, version, name), signatures, fetch)


def refuse_unsigned(rung: Rung, keys: Sequence[EllipticCurvePublicKey]) -> Refusal | None:
    """Why none of the trusted keys vouches for a rung; None where one does."""
    problem = problem_of(*rung.signatures(), keys)
    if problem is None:
        return None
    expected = f"one by {'the trusted key' if len(keys) == 1 else f'any of {len(keys)} trusted keys'}"
    return Refusal(rung=rung.name, reason="unsigned", got=problem, expected=expected)


def _why_not(name: str) -> str:
    """Why this machine, or this process under its limits, does not run a class; nothing where it does."""
    why_not = detect().why_not
    reason = why_not.get(name) or (why_not.get("cuda") if name.startswith("cuda-") else None)
    return f"; {reason}" if reason else ""


def _not_of_this_machine(name: str) -> Refusal:
    return Refusal(rung=name, reason="class_mismatch", got=", ".join(detect().classes), expected=name)


def unserved_gpus(reference: str | Path, store: str | None) -> list[Refusal]:
    """The published classes for GPUs that this machine, which has GPUs, does not serve; reads JSON only."""
    if folder_of(reference) is not None or not any(name.startswith("cuda-") for name in (*detect().classes, *detect().why_not)):
        return []
    return out_of_reach(Store.open(store or "store").version(str(reference)).images, detect())


def refusal_here(
    manifest: Manifest, num_threads: int, *, limit_isa: bool, canary: bool = True, device: torch.device | None = None
) -> Refusal | None:
    """Why the rung is refused from its manifest alone; with `limit_isa`, the limit is set instead of refusing for it.

    Args:
        device: that the model is to run on; None for what the artifact is made for.
    """
    kind = class_named(manifest.device_class).kind
    if device is not None and (device.type == "cuda") != (kind == "cuda"):
        what = "a GPU" if kind == "cuda" else "a CPU"
        return Refusal(
            rung=manifest.device_class, reason="device_mismatch", got=f"what runs on {what}", expected=f"device {device}"
        )
    if kind == "cuda" and (found := refuse_by_cuda(manifest, cuda_here(device))):
        return found
    found = refuse_by_torch(manifest, torch.__version__, canary=canary) or refuse_by_threads(manifest, num_threads)
    if found is not None:
        return found
    found = refuse_by_isa(manifest, detect())
    limits = class_named(manifest.device_class).limits
    if found is not None and limit_isa and limits:
        os.environ.update(limits)
        return refuse_by_isa(manifest, detect())
    return found


def needed_of(manifest: Manifest, num_threads: int, *, canary: bool) -> tuple[Payload | FileRef, ...]:
    """The files of an artifact that are read when it is opened; for the arguments see `open_artifact`."""
    golden = [item for item in manifest.files if item.path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS)] if canary else []
    return (*set_within(manifest.payloads, num_threads), *golden)
