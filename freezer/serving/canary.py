"""The canary: the golden inputs run again on the machine that will serve, held to the gate's own formula."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freezer.artifact.folder import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
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
    gate = GoldenGate(error_ratio_max=manifest.gate["error_ratio_max"], reference=manifest.reference)
    figures = []
    for spec in manifest.outputs:
        expected = [golden[f"{index}/{spec.name}"] for index in range(len(sets))]
        got = [outputs[spec.name] for outputs in found]
        whole = pooled(expected, got)
        for index, (golden_set, r, c) in enumerate(zip(sets, expected, got, strict=True)):
            ratio, worst = None, 0.0
            problem = exact_problem(r, c)
            if problem is None and comparable(r):
                rmse, rms, worst = rms_errors(r, c)
                if r.numel() < POOL_BELOW:
                    rmse, rms = whole
                native = golden_set.native_rmse.get(spec.name) or 0.0
                error = OutputError(rmse=rmse, native_rmse=native, rms=rms, dtype=r.dtype, num_elements=r.numel())
                ratio, _ = golden_bound(error, gate)
                problem = golden_problem(r, c, error, gate)
            figures.append(CanaryFigure(set_index=index, output=spec.name, error_ratio=ratio, max_abs_err=worst, problem=problem))
    return figures
