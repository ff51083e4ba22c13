"""Load a frozen model: resolve -> verify -> open -> canary -> FrozenModel.

The hardware is detected, only JSON is read until a rung is chosen, every digest is verified before anything is opened, no compiler
is touched, and the golden inputs are run again here, on the machine that will serve. When a rung fails the next is taken, down to
`portable`, and the model's `ladder` says which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
from freezer.artifact.manifest import Manifest, Payload
from freezer.artifact.payload_selection import counts_of, is_exact, set_within
from freezer.artifact.signatures import read_keys
from freezer.errors import (
    CanaryError,
    ColdpressError,
    CudaGraphsError,
    IncompatibleError,
    IntegrityError,
    Refusal,
    StoreUnreachableError,
)
from freezer.hardware.device_classes import device_class as class_named
from freezer.hardware.machine import detect
from freezer.runtime.cuda import current, device_of, with_index
from freezer.runtime.cuda_graphs import check_graphs
from freezer.runtime.devices import CPU
from freezer.runtime.frozen_model import FrozenModel, OpenPayload
from freezer.runtime.payloads import LOADERS
from freezer.runtime.threads import own_count
from freezer.runtime.threads import threads as using
from freezer.serving.canary import run_canary
from freezer.serving.resolve import budget_here, find_rungs, needed_of, refusal_here, refuse_unsigned, unserved_gpus

if TYPE_CHECKING:
    pass

logger = logging.getLogger("coldpress")


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
    run: Callable[..., Any] = LOADERS[payload.kind](path, settings, device, one_at_a_time=cuda_graphs and is_exact(payload))
    return run


def _why(rung: str, error: Exception) -> Refusal:
    reason = "tampered" if isinstance(error, IntegrityError) else "canary" if isinstance(error, CanaryError) else "does_not_open"
    expected = {"tampered": "the published digest", "canary": "the golden outputs"}.get(reason, "a payload that opens")
    lines = str(error).strip().splitlines() if not isinstance(error, ColdpressError) else [str(error)]
    return Refusal(rung=rung, reason=reason, got=lines[-1] if lines else type(error).__name__, expected=expected)
