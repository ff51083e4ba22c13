"""The canary: run the golden inputs on the machine that will serve, and apply the gate's formula to
the outputs. Imports torch only if the outputs are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact, Manifest, Payload
from freezer.codec import frozen
from freezer.compare import (
    POOL_BELOW,
    Comparison,
    Gate,
    Slices,
    Sums,
    Values,
    compare,
    golden_problem,
    pooled,
)
from freezer.errors import CanaryError, IntegrityError
from freezer.runtime.arrays import Array, name_of, widened
from freezer.runtime.contract import OpenModel
from freezer.runtime.tensor_files import golden_sets


@frozen
class CanaryFigure:
    """Result of one output of one golden set on this machine."""

    set_index: int
    output: str
    error_ratio: float | None
    max_abs_err: float
    problem: str | None


def run_canary(
    artifact: Artifact, model: OpenModel, *, smallest: bool = False
) -> list[CanaryFigure]:
    """Run the golden sets; for a stateful model without a reset method only the first, which starts
    from the initial state.

    Args:
        artifact, model: the artifact and its model, of one folder.
        smallest: run one set of each payload, the smallest, and the others only if one of these
            differs: outputs of few elements are judged over all sets. Ignored for stateful models.

    Raises:
        CanaryError: an output differs from the golden one.
    """
    manifest = artifact.manifest
    inputs = golden_inputs(artifact)
    reset = manifest.recipe.reset
    indices: Sequence[int] = range(len(inputs))
    rounds = [indices]
    if manifest.stateful and not reset:
        rounds = [[0]]
    elif smallest and not manifest.stateful:
        rounds = [smallest_sets(manifest, inputs, model.payload_for), indices]
    golden = golden_outputs(artifact)
    for chosen in rounds:
        answers = {}
        for index in chosen:
            if index and reset:
                model.preserved[reset]()
            answers[index] = [values_of_output(leaf) for leaf in model.leaves(**inputs[index])]
        figures = golden_figures(manifest, golden, answers)
        failed = [figure for figure in figures if figure.problem]
        if not failed:
            return figures
    first = failed[0]
    raise CanaryError(
        f"{manifest.model} for {manifest.device_class}: golden set {first.set_index}, output"
        f" {first.output!r}: {first.problem}; this machine computes different results: do not"
        " serve it here"
    )


def values_of_output(leaf: Any) -> Values:
    """The values of an output, which is a tensor or an array."""
    if not isinstance(leaf, np.ndarray):
        from freezer.runtime.tensors import to_array

        leaf = to_array(leaf)
    return Values(array=widened(leaf), dtype=name_of(leaf.dtype))


def golden_inputs(artifact: Artifact) -> list[dict[str, Array]]:
    """The golden inputs of every set by name, of an artifact whose files were verified."""
    names = [spec.name for spec in artifact.manifest.inputs.tensors]
    return golden_sets(artifact.folder / GOLDEN_INPUTS, names, len(artifact.manifest.golden))


def golden_outputs(artifact: Artifact) -> list[dict[str, Values]]:
    """The golden outputs of every set by name; see `golden_inputs`."""
    manifest = artifact.manifest
    names = [spec.name for spec in manifest.outputs]
    golden = []
    for outputs in golden_sets(artifact.folder / GOLDEN_OUTPUTS, names, len(manifest.golden)):
        golden.append({name: values_of_output(array) for name, array in outputs.items()})
    return golden


def golden_figures(
    manifest: Manifest,
    golden: Sequence[Mapping[str, Values]],
    answers: Mapping[int, Sequence[Values]],
) -> list[CanaryFigure]:
    """Figures of every output, from the answers to some golden sets.

    Raises:
        IntegrityError: the model has another number of outputs than the manifest.
    """
    for outputs in answers.values():
        if not len(outputs) == len(manifest.outputs) == manifest.structure.num_tensors:
            raise IntegrityError(
                f"the model returned {len(outputs)} tensors; the manifest names"
                f" {len(manifest.outputs)}, {manifest.structure.num_tensors} of them in its"
                " structure"
            )
    figures = []
    for position, spec in enumerate(manifest.outputs):
        pairs = {}
        for index, outputs in answers.items():
            pairs[index] = (golden[index][spec.name], outputs[position])
        figures += _output_figures(manifest, spec.name, pairs)
    return figures


def _output_figures(
    manifest: Manifest,
    output: str,
    pairs: Mapping[int, tuple[Values, Values]],
) -> list[CanaryFigure]:
    """Figures of one output, from its golden and its given values by index of the set."""
    limits = manifest.golden[0].scales.get(output, ())
    drawn = any(item.native_rmse.get(output) for item in manifest.golden)
    comparisons = {index: compare(r, c, limits, drawn=drawn) for index, (r, c) in pairs.items()}
    pool = pooled(comparisons.values())
    native_share = manifest.golden[0].slice_errors.get(output)
    slices = Slices(limits)
    figures = []
    for index, (r, c) in pairs.items():
        figure = _figure(manifest, output, index, r, comparisons[index], pool)
        figures.append(figure)
        if native_share is not None and figure.problem is None:
            slices.add(r, c)
    if native_share is None:
        return figures
    failed = slices.problem(r.dtype, manifest.gate.error_ratio_max, native_share)
    if failed:
        figures[-1] = replace(figures[-1], problem=failed.problem)
    return figures


def _figure(
    manifest: Manifest,
    output: str,
    index: int,
    r: Values,
    comparison: Comparison,
    pool: Sums,
) -> CanaryFigure:
    """Figure of one output in one set; outputs of few elements are judged over all sets."""
    ratio, problem = None, comparison.problem
    if comparison.groups:
        small = comparison.groups[0]
        sums = pool if r.size < POOL_BELOW else small
        native = manifest.golden[index].native_rmse.get(output) or 0.0
        error = sums.error(r.dtype, r.size)
        error = replace(error, native_rmse=native)
        float64 = manifest.reference == "float64"
        gate = Gate(error_ratio_max=manifest.gate.error_ratio_max, float64=float64)
        ratio, problem = golden_problem(error, gate, small)
    return CanaryFigure(
        set_index=index,
        output=output,
        error_ratio=ratio,
        max_abs_err=comparison.max_abs_err,
        problem=problem,
    )


def smallest_sets(
    manifest: Manifest,
    inputs: Sequence[Mapping[str, Array]],
    payload_for: Callable[[Mapping[str, int]], Payload],
) -> list[int]:
    """The golden set with the fewest elements of each open payload.

    Args:
        manifest: manifest of the artifact.
        inputs: inputs of each set.
        payload_for: returns the payload that serves some sizes.
    """
    sizes = []
    for index, values in enumerate(inputs):
        num_elements = sum(math.prod(value.shape) for value in values.values())
        sizes.append((num_elements, index))
    chosen: dict[str, int] = {}
    for _, index in sorted(sizes):
        payload = payload_for(manifest.golden[index].point)
        chosen.setdefault(payload.path, index)
    return sorted(chosen.values())
