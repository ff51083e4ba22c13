"""The canary: run the golden inputs on the machine that will serve, and apply the gate's formula to the outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
from freezer.artifact.manifest import Manifest
from freezer.errors import CanaryError
from freezer.numerics import (
    POOL_BELOW,
    GoldenGate,
    OutputError,
    comparable,
    exact_problem,
    golden_bound,
    golden_problem,
    pooled,
    rms_errors,
)
from freezer.runtime.devices import tensors_on
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.golden import Sets, golden_inputs, golden_outputs
from freezer.runtime.pytree import leaves_of
from freezer.slices import Slices


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryFigure:
    """Result of one output of one golden set on this machine."""

    set_index: int
    output: str
    error_ratio: float | None
    max_abs_err: float
    problem: str | None


def run_canary(artifact: Artifact, model: FrozenModel, *, smallest: bool = False) -> list[CanaryFigure]:
    """Run the golden sets; for a stateful model without a reset method only the first, which starts from the initial state.

    Args:
        artifact, model: of one folder.
        smallest: run one set of each payload, the smallest, and the others only if one of these differs: outputs of few elements
            are judged over all sets. Ignored for stateful models.

    Raises:
        CanaryError: an output differs from the golden one.
    """
    figures = canary_figures(artifact, model, smallest=smallest)
    if smallest and any(figure.problem for figure in figures) and not artifact.manifest.stateful:
        figures = canary_figures(artifact, model)
    for figure in figures:
        if figure.problem:
            raise CanaryError(
                f"{artifact.manifest.model} for {artifact.manifest.device_class}: golden set {figure.set_index}, output "
                f"{figure.output!r}: {figure.problem}; this machine computes different results: do not serve it here"
            )
    return figures


def canary_figures(artifact: Artifact, model: FrozenModel, *, smallest: bool = False) -> list[CanaryFigure]:
    """Run golden sets and compare, without raising for differences; see `run_canary`."""
    manifest = artifact.manifest
    inputs = golden_inputs(manifest, artifact.folder / GOLDEN_INPUTS)
    golden = golden_outputs(manifest, artifact.folder / GOLDEN_OUTPUTS)
    reset = manifest.recipe.reset
    indices = list(range(1 if manifest.stateful and not reset else len(inputs)))
    if smallest and not manifest.stateful:
        indices = _smallest(manifest, inputs, model)
    answers: list[list[Tensor]] = []
    for index in indices:
        if index and reset:
            model.preserved[reset]()
        given = tensors_on(inputs[index], model.device)
        answers.append([leaf.cpu() for leaf in leaves_of(model(**given))])
    gate = GoldenGate(error_ratio_max=manifest.gate.error_ratio_max, reference=manifest.reference)
    figures = []
    for spec, got in zip(manifest.outputs, zip(*answers, strict=True), strict=True):
        expected = [golden[index][spec.name] for index in indices]
        limits = manifest.golden[0].scales.get(spec.name, ())
        drawn = any(item.native_rmse.get(spec.name) for item in manifest.golden)  # concerns integers and bools alone
        small = any(r.numel() < POOL_BELOW for r in expected)
        whole = pooled(expected, got, limits) if small else (0.0, 0.0)
        share, slices = manifest.golden[0].slice_errors.get(spec.name), Slices(limits)
        for index, r, c in zip(indices, expected, got, strict=True):
            ratio, worst, problem = None, 0.0, exact_problem(r, c, limits, drawn=drawn)
            if problem is None and comparable(r):
                rmse, rms, worst = rms_errors(r, c, limits)
                if r.numel() < POOL_BELOW:
                    rmse, rms = whole
                native = manifest.golden[index].native_rmse.get(spec.name) or 0.0
                error = OutputError(rmse=rmse, native_rmse=native, rms=rms, dtype=r.dtype, num_elements=r.numel())
                ratio, problem = golden_bound(error, gate)[0], golden_problem(r, c, error, gate, limits)
            if problem is None and share is not None:
                slices.add(r, c)
            figures.append(CanaryFigure(set_index=index, output=spec.name, error_ratio=ratio, max_abs_err=worst, problem=problem))
        if share is not None and (found := slices.problem(expected[0].dtype, gate.error_ratio_max, share)):
            figures[-1] = replace(figures[-1], problem=found.problem)
    return figures


def _smallest(manifest: Manifest, inputs: Sets, model: FrozenModel) -> list[int]:
    """The golden set with the fewest elements of each open payload."""
    sizes = [sum(tensor.numel() for tensor in tensors.values()) for tensors in inputs]
    chosen: dict[str, int] = {}
    for index in sorted(range(len(inputs)), key=sizes.__getitem__):
        chosen.setdefault(model.payload_for(manifest.golden[index].point).path, index)
    return sorted(chosen.values())
