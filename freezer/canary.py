"""The canary: the golden inputs run again on the machine that will serve, held to the gate's own formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freezer.artifact import GOLDEN_INPUTS, GOLDEN_OUTPUTS, Artifact
from freezer.drift import POOL_BELOW, judge_rmse
from freezer.errors import CanaryError
from freezer.frozen_model import FrozenModel
from freezer.outputs import leaves_of
from freezer.tensor_files import load_tensors

EAGER_REFERENCE_TOL = 1e-3
"""Relative error of outputs whose reference was eager: OpenVINO's bound for float32; lower precisions get theirs by dtype."""


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
        given = {item.name: inputs[f"{index}/{item.name}"] for item in manifest.inputs.tensors}
        leaves = leaves_of(model(**given))
        found.append({spec.name: leaf for spec, leaf in zip(manifest.outputs, leaves, strict=True)})
    figures = []
    for spec in manifest.outputs:
        expected = [golden[f"{index}/{spec.name}"] for index in range(len(sets))]
        got = [outputs[spec.name] for outputs in found]
        pooled = _pooled(expected, got)
        for index, golden_set in enumerate(sets):
            native = golden_set.native_rmse.get(spec.name)
            figures.append(
                _figure(index, spec.name, expected[index], got[index], native, pooled, manifest.gate, manifest.reference)
            )
    return figures


def _figure(
    index: int,
    name: str,
    r: Tensor,
    c: Tensor,
    native: float | None,
    pooled: tuple[float, float],
    gate: Mapping[str, float],
    reference: str,
) -> CanaryFigure:
    problem = _exact_problem(r, c)
    if problem or not _comparable(r):
        return CanaryFigure(set_index=index, output=name, error_ratio=None, max_abs_err=0.0, problem=problem)
    rmse, rms, worst = _errors(r, c)
    if r.numel() < POOL_BELOW:
        rmse, rms = pooled
    ratio, bound = judge_rmse(
        rmse, native or 0.0, rms, dtype=r.dtype, num_elements=r.numel(), error_ratio_max=gate["error_ratio_max"]
    )
    if reference == "eager":
        bound = max(bound, EAGER_REFERENCE_TOL * rms, 4 * torch.finfo(r.dtype).eps * rms)
    if not rmse <= bound:
        problem = f"rmse {rmse:.3g} > {bound:.3g} (error_ratio {ratio:.3g})"
    return CanaryFigure(set_index=index, output=name, error_ratio=ratio, max_abs_err=worst, problem=problem)


def _exact_problem(r: Tensor, c: Tensor) -> str | None:
    if r.shape != c.shape or r.dtype != c.dtype:
        return f"got {c.dtype} {list(c.shape)}, expected {r.dtype} {list(r.shape)}"
    if not _comparable(r):
        wrong = int((r != c).sum())
        return f"{wrong} of {r.numel()} elements differ" if wrong else None
    infinite = r.isinf()
    if not torch.equal(r.isnan(), c.isnan()) or not torch.equal(infinite, c.isinf()) or not torch.equal(r[infinite], c[infinite]):
        return "NaN or Inf at other places"
    return None


def _comparable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _errors(r: Tensor, c: Tensor) -> tuple[float, float, float]:
    """rmse, rms of the reference, and the largest absolute error, over finite elements."""
    finite = r.isfinite() & c.isfinite()
    r64, c64 = (tensor[finite].to(torch.complex128 if r.is_complex() else torch.float64) for tensor in (r, c))
    count = max(r64.numel(), 1)
    error = (c64 - r64).abs()
    worst = float(error.max()) if error.numel() else 0.0
    return math.sqrt(float((error**2).sum()) / count), math.sqrt(float((r64.abs() ** 2).sum()) / count), worst


def _pooled(expected: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Rmse and rms of one output over all golden sets; infinite where they cannot be compared."""
    if any(_exact_problem(r, c) or not _comparable(r) for r, c in zip(expected, got, strict=True)):
        return math.inf, 0.0
    rmse, rms, _ = _errors(torch.cat([r.flatten() for r in expected]), torch.cat([c.flatten() for c in got]))
    return rmse, rms
