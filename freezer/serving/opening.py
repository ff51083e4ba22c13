"""Open an artifact folder with torch: verify -> open -> canary; native_load.py does so without
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import torch

from freezer.artifact import Artifact, Payload, thread_counts_of, version_tuple
from freezer.errors import Refusal
from freezer.hardware import detect
from freezer.hardware import device_class as class_named
from freezer.runtime.contract import OpenPayload
from freezer.runtime.devices import CPU, current, device_of
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.loaders import LOADERS, one_warning
from freezer.runtime.torch_settings import own_count, threads
from freezer.serving.canary import run_canary
from freezer.serving.compatibility import COMPILED, needed_files
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
        options: `threads`, `canary` and `device` apply; with `trusted_keys` private copies are
            opened.
        ladder: artifacts that were refused before this one.

    Raises:
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones.
    """
    manifest, made_for = artifact.manifest, class_named(artifact.manifest.device_class)
    device = CPU if options.device is None else torch.device(options.device)
    if options.device is None and made_for.kind == "cuda":
        device = device_of(made_for, detect())
    payloads, paths = needed_files(manifest, num_threads, options)
    calls = CallOptions(
        preserve=manifest.recipe.preserve,
        num_threads=options.threads,
        device=device,
        precision=manifest.recipe.precision,
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
    is_older = version_tuple(manifest.needs.torch) < version_tuple(torch.__version__)
    is_compiled = any(payload.kind in COMPILED for payload in payloads)
    warned = one_warning(manifest.model) if is_older and is_compiled else nullcontext()
    with _opening, threads(count), current(calls.device), warned:
        for payload in payloads:
            path = artifact.folder / payload.path
            run = LOADERS[payload.kind](path, manifest.recipe.settings, calls.device)
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
