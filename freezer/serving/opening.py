"""Open an artifact folder with torch: verify -> open -> canary; native_load.py does so without
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    Artifact,
    Payload,
    counts_of,
    is_exact,
    set_within,
)
from freezer.errors import Refusal
from freezer.hardware import detect
from freezer.hardware import device_class as class_named
from freezer.runtime.contract import OpenPayload
from freezer.runtime.cuda_graphs import check_graphs
from freezer.runtime.devices import CPU, current, device_of
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.loaders import LOADERS, PayloadLoader, open_inductor
from freezer.runtime.torch_settings import own_count
from freezer.runtime.torch_settings import threads as with_threads
from freezer.serving.canary import run_canary
from freezer.serving.notices import log_speed
from freezer.serving.selection import LoadOptions


def open_artifact(
    artifact: Artifact, num_threads: int, options: LoadOptions, *, ladder: Sequence[Refusal] = ()
) -> FrozenModel:
    """Verify the needed files of an artifact folder, open its payloads, and run the canary.

    Args:
        artifact: serves this machine.
        num_threads: that calls may use; payloads for this count are opened, else those for the
            largest count below it.
        options: `threads`, `canary`, `device` and `cuda_graphs` apply; with `trusted_keys` private
            copies are opened.
        ladder: of the model.

    Raises:
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones.
        CudaGraphsError: calls cannot be captured.
    """
    manifest, made_for = artifact.manifest, class_named(artifact.manifest.device_class)
    device = CPU if options.device is None else torch.device(options.device)
    if options.device is None and made_for.kind == "cuda":
        device = device_of(made_for, detect())
    payloads = set_within(manifest.payloads, num_threads)
    if options.cuda_graphs:
        check_graphs(manifest, payloads, device)
    golden = (
        [artifact.file(path).path for path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS)]
        if options.canary
        else []
    )
    counts = counts_of(payloads)
    serving = max(counts, default=num_threads if options.threads is not None else own_count())

    def opened(artifact: Artifact) -> FrozenModel:
        with with_threads(serving), current(device):  # some loaders pack weights
            runners = [_opened(artifact, payload, options, device) for payload in payloads]
        return FrozenModel(
            spec=manifest.inputs,
            outputs=manifest.outputs,
            structure=manifest.structure,
            payloads=runners,
            manifest=manifest,
            ladder=ladder,
            options=CallOptions(
                preserve=manifest.recipe.preserve,
                num_threads=options.threads,
                device=device,
                cuda_graphs=options.cuda_graphs,
            ),
        )

    with ExitStack() as stack:
        held = artifact.held(
            [*(item.path for item in payloads), *golden], stack, private=bool(options.trusted_keys)
        )
        model = opened(held)
        if options.canary:
            run_canary(held, model, smallest=True)
            if manifest.stateful:
                model = opened(held)
    log_speed(manifest, payloads, num_threads, serving)
    return model


def _opened(
    artifact: Artifact, payload: Payload, options: LoadOptions, device: torch.device
) -> OpenPayload:
    load: PayloadLoader = LOADERS[payload.kind]
    if options.cuda_graphs and is_exact(payload) and payload.kind == "inductor":
        load = partial(open_inductor, one_at_a_time=True)  # as a graph's replays are
    settings = artifact.manifest.recipe.settings
    return OpenPayload(payload=payload, run=load(artifact.folder / payload.path, settings, device))
