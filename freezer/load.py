"""Load a frozen model: resolve -> verify -> open -> canary -> FrozenModel.

The hardware is detected, only JSON is read until a rung is chosen, every digest is verified before anything is opened, no compiler
is touched, and the golden inputs are run again here, on the machine that will serve. When a rung fails the next is taken, down to
`portable`, and the model's `ladder` says which and why.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, MANIFEST, Artifact, folder_of
from freezer.build import lowering_module
from freezer.canary import run_canary
from freezer.cuda_devices import cuda_here, current, device_of, with_index
from freezer.cuda_graphs import check_graphs
from freezer.cuda_needs import out_of_reach, refuse_by_cuda
from freezer.device_class import detect
from freezer.device_class import device_class as class_named
from freezer.errors import (
    CanaryError,
    ColdpressError,
    CudaGraphsError,
    IncompatibleError,
    IntegrityError,
    StoreUnreachableError,
    UsageError,
)
from freezer.frozen_model import FrozenModel, OpenPayload
from freezer.ladder import Refusal, refuse_by_isa, refuse_by_threads, refuse_by_torch, rungs
from freezer.manifest import FileRef, Manifest, Payload
from freezer.moving import CPU
from freezer.payload_choice import counts_of, is_exact, set_within
from freezer.signing import Signatures, problem_of, read_keys
from freezer.store import Store
from freezer.thread_budget import thread_budget
from freezer.thread_count import own_count
from freezer.thread_count import threads as using

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

logger = logging.getLogger("coldpress")


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


def load(
    reference: str | Path,
    *,
    store: str | None = None,
    device_class: str = "auto",
    threads: int | None = None,
    strict: bool = False,
    limit_isa: bool = False,
    canary: bool = True,
    device: str | None = None,
    cuda_graphs: bool = False,
    trusted_keys: Sequence[str | Path] = (),
) -> FrozenModel:
    """The frozen model for this machine.

    Args:
        reference: `MODEL` or `MODEL:VERSION` in a store, or an artifact folder.
        store: URI of the store; `./store` by default. Not used for a folder.
        device_class: the one class to take, or `auto` for the most specific that serves.
        threads: the threads that calls may use; by default what torch uses in this process, but no more than it has CPUs by its
            affinity and its control groups' quotas. The payloads for just that count are taken, else those for the largest below.
        strict: raise when the first rung does not serve, instead of taking the next; the error has what the manifests of the others
            say against them too.
        limit_isa: allow oneDNN to be limited to a lesser class's instruction set, for the whole process. It takes effect only
            before torch's first oneDNN operation in the process.
        canary: run the golden inputs and compare; turn it off only where another check stands in for it.
        device: where the model is to run: `cpu`, `cuda:1`; artifacts for anything else are no rungs then. By default what the
            artifact that serves is made for: of a CUDA class the current GPU where it is of the class, else the first that is.
        cuda_graphs: on a GPU, capture each call that a payload of one size serves, and replay it ever after; calls of one size then
            run one after the other. For a model that neither changes state nor draws.
        trusted_keys: PEM files of public keys, one of which must have signed what is opened (`coldpress sign`). None asks for no
            signature.

    Raises:
        CudaGraphsError: calls of what serves cannot be captured.
        UsageError: this process has no such device.
        NotPublishedError, StoreUnreachableError: the reference cannot be resolved.
        IncompatibleError: no rung serves; its `ladder` has every reason.
    """
    with ExitStack() as stack:
        ladder: list[Refusal] = []
        num_threads, where = budget_here(threads), None if device is None else with_index(device)
        aside = unserved_gpus(reference, store) if device_class == "auto" else []
        keys = read_keys(trusted_keys)
        for rung in find_rungs(reference, store, device_class, stack):
            try:
                limit = limit_isa and not (strict and ladder)
                found = refuse_unsigned(rung, keys) if keys else None
                if found is None:
                    manifest = rung.manifest()
                    found = refusal_here(manifest, num_threads, limit_isa=limit, canary=canary, device=where)
                if found is None and strict and ladder:
                    continue  # it might serve, and is not asked to
                if found is None:
                    needed = needed_of(manifest, num_threads, canary=canary)
                    return open_artifact(
                        rung.fetch([item.path for item in needed]),
                        num_threads,
                        asked=threads is not None,
                        ladder=(*aside, *ladder),
                        canary=canary,
                        device=where,
                        cuda_graphs=cuda_graphs,
                    )
            except (StoreUnreachableError, CudaGraphsError):
                raise
            except Exception as error:  # whatever a payload raises is this rung's failure, and the next one is tried
                found = _why(rung.name, error)
            ladder.append(found)
            logger.warning("%s is refused: %s", reference, found)
        ladder = [*aside, *ladder]
        reasons = "; ".join(str(item) for item in ladder) or "nothing is published for this machine's classes"
        what = "the best artifact for" if strict and ladder else "no artifact serves"
        refused = " is refused, and strict=True takes no other" if strict and ladder else ""
        raise IncompatibleError(f"{reference}: {what} this machine ({', '.join(detect().classes)}){refused}: {reasons}", ladder)


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


def open_artifact(
    artifact: Artifact,
    num_threads: int,
    *,
    asked: bool = False,
    ladder: Sequence[Refusal] = (),
    canary: bool = True,
    device: torch.device | None = None,
    cuda_graphs: bool = False,
) -> FrozenModel:
    """The model of an artifact folder: what is needed is verified, then the payloads are opened and the canary is run.

    Args:
        artifact: that serves this machine.
        num_threads: that calls may use; payloads for that count are opened, else those for the largest below it.
        asked: whether the caller asked for the count, so that payloads for any count run with it too.
        ladder: of the model.
        canary, cuda_graphs: as of `load`.
        device: that it is opened on; None for what it is made for.

    Raises:
        IntegrityError, CanaryError: the bytes, or the outputs, are not what was published.
        CudaGraphsError: as of `load`.
    """
    manifest = artifact.manifest
    device = device or device_for(manifest)
    fitting = set_within(manifest.payloads, num_threads)
    serving = max(counts_of(fitting), default=num_threads if asked else own_count())
    if cuda_graphs:
        check_graphs(manifest, fitting, device)
    artifact.verify((*fitting, *(artifact.file(path) for path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS) if canary)))

    def fresh() -> FrozenModel:
        settings = manifest.recipe["settings"]
        with using(serving), current(device):  # some pack their weights while they are opened
            opened = [
                OpenPayload(payload=p, run=_opened(artifact.folder / p.path, p, settings, device, cuda_graphs=cuda_graphs))
                for p in fitting
            ]
        return FrozenModel(
            spec=manifest.inputs,
            outputs=manifest.outputs,
            structure=manifest.structure,
            payloads=opened,
            manifest=manifest,
            ladder=ladder,
            preserve=manifest.recipe.get("preserve", ()),  # the first manifests have none
            num_threads=num_threads if asked else None,
            device=device,
            cuda_graphs=cuda_graphs,
        )

    model = fresh()
    if canary:
        run_canary(artifact, model)
        if manifest.stateful:
            model = fresh()
    if counts_of(fitting) and serving != num_threads:
        logger.info(
            "%s for %s: calls run with %d threads, though they may use %d, since nothing in it is laid out for %d; freeze it with "
            "`threads: %s` for more speed",
            *(manifest.model, manifest.device_class, serving, num_threads, num_threads),
            sorted({*counts_of(manifest.payloads), num_threads}),
        )
    return model


def device_for(manifest: Manifest) -> torch.device:
    """Where an artifact runs when nothing was asked for: the CPU, or of a CUDA class a GPU of it."""
    made_for = class_named(manifest.device_class)
    return device_of(made_for, detect()) if made_for.kind == "cuda" else CPU


def _opened(
    path: Path, payload: Payload, settings: Mapping[str, Any], device: torch.device, *, cuda_graphs: bool
) -> Callable[..., Any]:
    """A payload's runner; one whose calls a graph replays has them one at a time."""
    run: Callable[..., Any] = lowering_module(payload.kind).open_payload(
        path, settings, device, one_at_a_time=cuda_graphs and is_exact(payload)
    )
    return run


def _why(rung: str, error: Exception) -> Refusal:
    reason = "tampered" if isinstance(error, IntegrityError) else "canary" if isinstance(error, CanaryError) else "does_not_open"
    expected = {"tampered": "the published digest", "canary": "the golden outputs"}.get(reason, "a payload that opens")
    lines = str(error).strip().splitlines() if not isinstance(error, ColdpressError) else [str(error)]
    return Refusal(rung=rung, reason=reason, got=lines[-1] if lines else type(error).__name__, expected=expected)
