"""Open an artifact folder with torch: verify -> open -> canary; native_load.py does so without
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from freezer.artifact import (
    Artifact,
    Manifest,
    Payload,
    is_exact,
    thread_counts_of,
)
from freezer.errors import CudaGraphsError, Refusal
from freezer.hardware import detect
from freezer.hardware import device_class as class_named
from freezer.runtime.contract import OpenPayload
from freezer.runtime.devices import CPU, current, device_of
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.loaders import LOADERS, PayloadLoader, open_inductor
from freezer.runtime.torch_settings import own_count, threads
from freezer.serving.canary import run_canary
from freezer.serving.compatibility import needed_files
from freezer.serving.process import LoadOptions

_opening = threading.Lock()
"""Held while payloads are opened: torch.export.load keeps its state in globals."""


def open_artifact(
    artifact: Artifact, num_threads: int, options: LoadOptions, *, ladder: Sequence[Refusal] = ()
) -> FrozenModel:
    """Verify the needed files of an artifact folder, open its payloads, and run the canary.

    Args:
        artifact: artifact that serves this machine.
        num_threads: threads that calls may use; payloads for this count are opened, else those for
            the largest count below it.
        options: `threads`, `canary`, `device` and `cuda_graphs` apply; with `trusted_keys` private
            copies are opened.
        ladder: artifacts that were refused before this one.

    Raises:
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones.
        CudaGraphsError: calls cannot be captured.
    """
    manifest, made_for = artifact.manifest, class_named(artifact.manifest.device_class)
    device = CPU if options.device is None else torch.device(options.device)
    if options.device is None and made_for.kind == "cuda":
        device = device_of(made_for, detect())
    payloads, paths = needed_files(manifest, num_threads, options)
    if options.cuda_graphs:
        check_graphs(manifest, payloads, device)
    calls = CallOptions(
        preserve=manifest.recipe.preserve,
        num_threads=options.threads,
        device=device,
        cuda_graphs=options.cuda_graphs,
    )
    with ExitStack() as stack:
        held = artifact.held(paths, stack, private=bool(options.trusted_keys))
        model = _open(held, payloads, num_threads, calls, ladder)
        if options.canary:
            run_canary(held, model, smallest=True)
            if manifest.stateful:
                model = _open(held, payloads, num_threads, calls, ladder)
    return model


def _open(
    artifact: Artifact,
    payloads: Sequence[Payload],
    num_threads: int,
    calls: CallOptions,
    ladder: Sequence[Refusal],
) -> FrozenModel:
    manifest = artifact.manifest
    any_count = num_threads if calls.num_threads is not None else own_count()
    runners: list[OpenPayload] = []
    # Some loaders pack weights for the thread count.
    count = max(thread_counts_of(payloads), default=any_count)
    with _opening, threads(count), current(calls.device):
        for payload in payloads:
            load: PayloadLoader = LOADERS[payload.kind]
            if calls.cuda_graphs and is_exact(payload) and payload.kind == "inductor":
                load = partial(open_inductor, one_at_a_time=True)  # as a graph's replays are
            path = artifact.folder / payload.path
            run = load(path, manifest.recipe.settings, calls.device)
            runners.append(OpenPayload(payload=payload, run=run))
    return FrozenModel(
        spec=manifest.inputs,
        outputs=manifest.outputs,
        structure=manifest.structure,
        payloads=runners,
        manifest=manifest,
        ladder=ladder,
        options=calls,
    )


def check_graphs(manifest: Manifest, payloads: Sequence[Payload], device: torch.device) -> None:
    """Check that calls of an artifact can be captured.

    Raises:
        CudaGraphsError: they cannot.
    """
    if device.type != "cuda":
        problem = (
            f"the artifact for {manifest.device_class} does not run on a GPU; set device_class to a"
            " CUDA class, or strict=True"
        )
    elif manifest.stateful:
        problem = "a call changes its state, and a replay would start from the captured state"
    elif not manifest.drift.deterministic:
        problem = (
            "it draws random numbers, or sums in varying order, so that a replay cannot be checked"
        )
    elif not any(is_exact(payload) for payload in payloads):
        problem = "it has no payload for one size; freeze it with `points`, or without dims"
    else:
        return
    raise CudaGraphsError(
        f"{manifest.model} for {manifest.device_class}: no CUDA graphs: {problem}; or load it"
        " without cuda_graphs"
    )
