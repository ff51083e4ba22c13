"""Open the selected artifact without torch: verify -> open -> canary. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from freezer.artifact import Artifact, Payload
from freezer.compare import Values
from freezer.errors import Refusal
from freezer.runtime.contract import OpenPayload
from freezer.runtime.native import NativeModel, NativePayload
from freezer.runtime.tensor_files import load_arrays
from freezer.serving.canary import golden_inputs, golden_outputs, passing_figures, smallest_sets
from freezer.serving.compatibility import needed_files
from freezer.serving.process import LoadOptions


def open_native(
    artifact: Artifact,
    num_threads: int,
    options: LoadOptions,
    *,
    ladder: Sequence[Refusal] = (),
) -> NativeModel:
    """Verify the needed files of an artifact folder, open its Inductor payloads, and run the
    canary; see `open_artifact`.

    Raises:
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones.
    """
    manifest = artifact.manifest
    payloads, paths = needed_files(manifest, num_threads, options)
    with ExitStack() as stack:
        held = artifact.held(paths, stack, private=bool(options.trusted_keys))
        model = NativeModel(
            spec=manifest.inputs,
            outputs=manifest.outputs,
            structure=manifest.structure,
            payloads=[_open(held, payload, num_threads) for payload in payloads],
            manifest=manifest,
            ladder=ladder,
        )
        if options.canary:
            run_native_canary(held, model)
    return model


def _open(
    artifact: Artifact,
    payload: Payload,
    num_threads: int,
) -> OpenPayload:
    run = NativePayload(
        artifact.folder / payload.path,
        num_threads=payload.num_threads or num_threads,
        num_inputs=len(artifact.manifest.inputs.tensors),
        num_outputs=len(artifact.manifest.outputs),
    )
    return OpenPayload(payload=payload, run=run)


def run_native_canary(
    artifact: Artifact,
    model: NativeModel,
) -> None:
    """Run the smallest golden set of each payload, and all sets if one of these differs; see
    `run_canary`.

    Raises:
        CanaryError: an output differs from the golden one.
    """
    manifest = artifact.manifest
    inputs = golden_inputs(artifact, load_arrays)

    def answer(index: int) -> list[Values]:
        return [Values.of(leaf) for leaf in model.leaves(**inputs[index])]

    golden = golden_outputs(artifact, load_arrays, Values.of)
    rounds = (smallest_sets(manifest, inputs, model.payload_for), range(len(inputs)))
    passing_figures(manifest, golden, answer, rounds)
