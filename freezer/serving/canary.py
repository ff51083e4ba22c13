"""The canary: the golden inputs run again on the machine that will serve, held to the gate's own formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
from freezer.errors import CanaryError
from freezer.numerics import POOL_BELOW, comparable, errors, exact_problem, golden_bound, golden_problem, pooled
from freezer.runtime.devices import tensors_on
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.pytree import leaves_of
from freezer.runtime.tensor_files import load_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryFigure:
    """One output of one golden set, on this machine."""

    set_index: int
    output: str
    error_ratio: float | None
    max_abs_err: float
    problem: str | None


def run_canary(artifact: Artifact, model: FrozenModel) -> list[CanaryFigure]:
    """Run the golden sets; of a stateful model without a reset method the first alone, which starts from the initial state.

    Raises:
        CanaryError: an output is not the golden one.
    """
    figures = canary_figures(artifact, model)
    for figure in figures:
        if figure.problem:
            raise CanaryError(
                f"{artifact.manifest.model} for {artifact.manifest.device_class}: golden set {figure.set_index}, output "
                f"{figure.output!r}: {figure.problem}; this machine computes it otherwise: do not serve it here"
            )
    return figures


def canary_figures(artifact: Artifact, model: FrozenModel) -> list[CanaryFigure]:
    """How far this machine's outputs are from the golden ones."""
    manifest = artifact.manifest
    inputs, golden = load_tensors(artifact.folder / GOLDEN_INPUTS), load_tensors(artifact.folder / GOLDEN_OUTPUTS)
    reset = manifest.recipe.get("reset")
    sets = manifest.golden[:1] if manifest.stateful and not reset else manifest.golden
    found: list[dict[str, Tensor]] = []
    for index in range(len(sets)):
        if index and reset:
            model.preserved[reset]()
        given = tensors_on({item.name: inputs[f"{index}/{item.name}"] for item in manifest.inputs.tensors}, model.device)
        leaves = [leaf.cpu() for leaf in leaves_of(model(**given))]
        found.append({spec.name: leaf for spec, leaf in zip(manifest.outputs, leaves, strict=True)})
    figures = []
    for spec in manifest.outputs:
        expected = [golden[f"{index}/{spec.name}"] for index in range(len(sets))]
        got = [outputs[spec.name] for outputs in found]
        over_all = pooled(expected, got)
        for index, golden_set in enumerate(sets):
            native = golden_set.native_rmse.get(spec.name)
            figures.append(
                _figure(index, spec.name, expected[index], got[index], native, over_all, manifest.gate, manifest.reference)
            )
    return figures


def _figure(
    index: int,
    name: str,
    r: Tensor,
    c: Tensor,
    native: float | None,
    over_all: tuple[float, float],
    gate: Mapping[str, float],
    reference: str,
) -> CanaryFigure:
    problem = exact_problem(r, c)
    if problem or not comparable(r):
        return CanaryFigure(set_index=index, output=name, error_ratio=None, max_abs_err=0.0, problem=problem)
    rmse, rms, worst = errors(r, c)
    if r.numel() < POOL_BELOW:
        rmse, rms = over_all
    ratio, bound = golden_bound(rmse, native or 0.0, rms, r, gate=gate, reference=reference)
    problem = golden_problem(r, c, rmse, bound, ratio, reference=reference)
    return CanaryFigure(set_index=index, output=name, error_ratio=ratio, max_abs_err=worst, problem=problem)
