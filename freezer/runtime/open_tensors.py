"""Open the payloads of an artifact with torch; native/model.py does so without torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

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

_opening = threading.Lock()
"""Held while payloads are opened: torch.export.load keeps its state in globals."""


def open_tensors(
    artifact: Artifact,
    payloads: Sequence[Payload],
    num_threads: int,
    ladder: Sequence[Refusal],
    calls: CallOptions,
) -> FrozenModel:
    """Open payloads with torch; see open_arrays.

    Args:
        artifact, payloads, num_threads, ladder: as for open_arrays.
        calls: how calls run.
    """
    manifest = artifact.manifest
    any_count = own_count() if calls.num_threads is None else num_threads
    # Some loaders pack weights for the thread count.
    count = max(thread_counts_of(payloads), default=any_count)
    is_older = version_tuple(manifest.needs.torch) < version_tuple(torch.__version__)
    is_compiled = any(payload.kind == "inductor" for payload in payloads)
    warned = one_warning(manifest.model) if is_older and is_compiled else nullcontext()
    runners: list[OpenPayload] = []
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


def calls_of(
    artifact: Artifact,
    num_threads: int | None,
    device: str | None,
    *,
    as_numpy: bool,
) -> CallOptions:
    """How calls of an artifact run.

    Args:
        artifact: the artifact.
        num_threads: threads that the caller asked for; None for the process's own.
        device: device to run on; None for the one that the artifact is made for.
        as_numpy: whether calls return arrays.
    """
    recipe, made_for = artifact.manifest.recipe, class_named(artifact.manifest.device_class)
    on_device = CPU if device is None else torch.device(device)
    if device is None and made_for.kind == "cuda":
        on_device = device_of(made_for, detect())
    return CallOptions(
        preserve=recipe.preserve,
        num_threads=num_threads,
        device=on_device,
        precision=recipe.precision,
        as_numpy=as_numpy,
    )
