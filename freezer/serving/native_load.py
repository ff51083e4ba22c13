"""Open the selected artifact without torch: verify -> open -> canary. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact, Payload, payloads_within
from freezer.compare import Values
from freezer.errors import Refusal
from freezer.runtime.contract import OpenPayload
from freezer.runtime.native import NativeModel, NativePayload
from freezer.runtime.tensor_files import golden_inputs, golden_outputs, load_arrays
from freezer.serving.canary import check_figures, golden_figures, smallest_sets
from freezer.serving.compatibility import native_payloads
from freezer.serving.process import LoadOptions


def open_native(
    artifact: Artifact, num_threads: int, options: LoadOptions, *, ladder: Sequence[Refusal] = ()
) -> NativeModel:
    """Verify the needed files of an artifact folder, open its Inductor payloads, and run the
    canary; see `open_artifact`.

    Raises:
        IntegrityError, CanaryError: the bytes or the outputs differ from the published ones.
    """
    manifest = artifact.manifest
    payloads = payloads_within(native_payloads(manifest), num_threads)
    with ExitStack() as stack:
        golden = (GOLDEN_INPUTS, GOLDEN_OUTPUTS) if options.canary else ()
        paths = [*(payload.path for payload in payloads), *golden]
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
    inputs = golden_inputs(manifest, artifact.folder / GOLDEN_INPUTS, load_arrays)
    outputs = golden_outputs(manifest, artifact.folder / GOLDEN_OUTPUTS, load_arrays)
    golden = []
    for arrays in outputs:
        golden.append({name: Values.of(array) for name, array in arrays.items()})
    sizes: list[int] = []
    for arrays in inputs:
        sizes.append(sum(array.size for array in arrays.values()))
    for indices in (smallest_sets(manifest, sizes, model.payload_for), range(len(inputs))):
        answers = {}
        for index in indices:
            leaves = model.leaves(**inputs[index])
            answers[index] = [Values.of(leaf) for leaf in leaves]
        figures = golden_figures(manifest, golden, answers)
        if not any(figure.problem for figure in figures):
            return
    check_figures(manifest, figures)
