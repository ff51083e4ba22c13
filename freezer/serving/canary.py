"""The canary: run the golden inputs on the machine that will serve, and apply the gate's formula to
the outputs.

Imports torch only to run a model of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact, Manifest, Payload
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
from freezer.runtime.tensor_files import Shaped, golden_inputs, golden_outputs, load_tensors

if TYPE_CHECKING:
    from freezer.runtime.frozen_model import FrozenModel

_Value = TypeVar("_Value", bound=Shaped)


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryFigure:
    """Result of one output of one golden set on this machine."""

    set_index: int
    output: str
    error_ratio: float | None
    max_abs_err: float
    problem: str | None


def run_canary(
    artifact: Artifact,
    model: FrozenModel,
    *,
    smallest: bool = False,
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
    figures = canary_figures(artifact, model, smallest=smallest)
    failed = any(figure.problem for figure in figures)
    if failed and smallest and not artifact.manifest.stateful:
        figures = canary_figures(artifact, model)
    check_figures(artifact.manifest, figures)
    return figures


def canary_figures(
    artifact: Artifact,
    model: FrozenModel,
    *,
    smallest: bool = False,
) -> list[CanaryFigure]:
    """Run golden sets and compare, without raising for differences; see `run_canary`."""
    from freezer.compare.tensor_values import values_of
    from freezer.runtime.devices import tensors_on
    from freezer.runtime.tensors import leaves_of

    manifest = artifact.manifest
    inputs, golden = golden_sets(artifact, load_tensors, values_of)
    reset = manifest.recipe.reset
    indices = list(range(len(inputs)))
    if manifest.stateful and not reset:
        indices = [0]
    if smallest and not manifest.stateful:
        indices = smallest_sets(manifest, inputs, model.payload_for)
    answers = {}
    for index in indices:
        if index and reset:
            model.preserved[reset]()
        tensors = tensors_on(inputs[index], model.device)
        leaves = leaves_of(model(**tensors))
        answers[index] = [values_of(leaf.cpu()) for leaf in leaves]
    return golden_figures(manifest, golden, answers)


def golden_sets(
    artifact: Artifact,
    load: Callable[[Path], dict[str, _Value]],
    values_of: Callable[[_Value], Values],
) -> tuple[list[dict[str, _Value]], list[dict[str, Values]]]:
    """The golden inputs and outputs of every set, by name.

    Args:
        artifact: artifact whose files were verified.
        load: reads a .safetensors file as tensors or arrays.
        values_of: converts an output for the comparison.
    """
    inputs = golden_inputs(artifact.manifest, artifact.folder / GOLDEN_INPUTS, load)
    golden = []
    for outputs in golden_outputs(artifact.manifest, artifact.folder / GOLDEN_OUTPUTS, load):
        golden.append({name: values_of(value) for name, value in outputs.items()})
    return inputs, golden


def golden_figures(
    manifest: Manifest,
    golden: Sequence[Mapping[str, Values]],
    answers: Mapping[int, Sequence[Values]],
) -> list[CanaryFigure]:
    """Figures of every output of some golden sets.

    Args:
        manifest: manifest of the artifact.
        golden: golden outputs by name, of every set.
        answers: outputs in order, by index of the set.

    Raises:
        IntegrityError: the model has another number of outputs than the manifest.
    """
    for outputs in answers.values():
        if len(outputs) != len(manifest.outputs):
            raise IntegrityError(
                f"the model returned {len(outputs)} tensors; the manifest names"
                f" {len(manifest.outputs)}"
            )
    figures = []
    for position, spec in enumerate(manifest.outputs):
        pairs = {}
        for index, outputs in answers.items():
            r = golden[index][spec.name]
            pairs[index] = (r, outputs[position])
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
    comparisons = {}
    for index, (r, c) in pairs.items():
        comparisons[index] = compare(r, c, limits, drawn=drawn)
    pool = pooled(comparisons.values())
    native_share = manifest.golden[0].slice_errors.get(output)
    slices = Slices(limits)
    figures = []
    for index, (r, c) in pairs.items():
        figure = _figure(
            manifest,
            output,
            index,
            r,
            comparisons[index],
            pool,
        )
        figures.append(figure)
        if native_share is not None and figure.problem is None:
            slices.add(r, c)
    if native_share is None:
        return figures
    limit = manifest.gate.error_ratio_max
    failed = slices.problem(r.dtype, limit, native_share)
    if failed:
        figures[-1] = replace(
            figures[-1],
            problem=failed.problem,
        )
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


def check_figures(
    manifest: Manifest,
    figures: Sequence[CanaryFigure],
) -> None:
    """Raise for the first output that differs.

    Raises:
        CanaryError: one does.
    """
    for figure in figures:
        if figure.problem:
            raise CanaryError(
                f"{manifest.model} for {manifest.device_class}: golden set {figure.set_index},"
                f" output {figure.output!r}: {figure.problem}; this machine computes different"
                " results: do not serve it here"
            )


def smallest_sets(
    manifest: Manifest,
    inputs: Sequence[Mapping[str, Shaped]],
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
