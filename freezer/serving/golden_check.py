"""Compare the outputs of golden inputs with the golden outputs, by the gate's formula.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray

from freezer.artifact import Manifest, Payload
from freezer.compare.gate import (
    POOL_BELOW,
    GoldenGate,
    OutputError,
    Sums,
    gate_problem,
    golden_bound,
)
from freezer.compare.slices import Slices
from freezer.errors import CanaryError, IntegrityError


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryFigure:
    """Result of one output of one golden set on this machine."""

    set_index: int
    output: str
    error_ratio: float | None
    max_abs_err: float
    problem: str | None


class ExactProblem(Protocol):
    """First difference that no rounding explains; None if there is none; see `exact_problem` of
    numerics.py.
    """

    def __call__(
        self, r: Any, c: Any, limits: Sequence[float] = ..., *, drawn: bool = ...
    ) -> str | None:
        """Compare an output with its reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How to compare tensors, or arrays; see numerics.py and array_numerics.py."""

    comparable: Callable[[Any], bool]
    exact_problem: ExactProblem
    distances: Callable[[Any, Any, Sequence[float]], list[Sums]]
    doubles: Callable[[Any], NDArray[Any]]


def golden_figures(
    manifest: Manifest,
    golden: Sequence[Mapping[str, Any]],
    answers: Mapping[int, Sequence[Any]],
    compare: Comparison,
) -> list[CanaryFigure]:
    """Figures of every output of some golden sets.

    Args:
        manifest: of the artifact.
        golden: golden outputs by name, of every set.
        answers: outputs in order, by index of the set.
        compare: for their kind of array.

    Raises:
        IntegrityError: the model has another number of outputs than the manifest.
    """
    for outputs in answers.values():
        if len(outputs) != len(manifest.outputs):
            raise IntegrityError(
                f"the model returned {len(outputs)} tensors; the manifest names"
                f" {len(manifest.outputs)}"
            )
    gate = GoldenGate(error_ratio_max=manifest.gate.error_ratio_max, reference=manifest.reference)
    drawn_by = [item.native_rmse for item in manifest.golden]
    figures = []
    for place, spec in enumerate(manifest.outputs):
        pairs = {
            index: (golden[index][spec.name], outputs[place]) for index, outputs in answers.items()
        }
        limits = manifest.golden[0].scales.get(spec.name, ())
        drawn = any(item.get(spec.name) for item in drawn_by)  # concerns integers and bools alone
        problems = {
            index: compare.exact_problem(r, c, limits, drawn=drawn)
            for index, (r, c) in pairs.items()
        }
        sums = {
            index: compare.distances(r, c, limits)
            for index, (r, c) in pairs.items()
            if problems[index] is None and compare.comparable(r)
        }
        share, slices = (
            manifest.golden[0].slice_errors.get(spec.name),
            Slices(compare.doubles, limits),
        )
        for index, (r, c) in pairs.items():
            ratio, worst, problem = None, 0.0, problems[index]
            if index in sums:
                worst = max(group.max_abs_err for group in sums[index])
                error = _error(
                    manifest, spec.name, index, r, sums, complete=len(sums) == len(pairs)
                )
                ratio, problem = (
                    golden_bound(error, gate)[0],
                    gate_problem(error, gate, sums[index][0]),
                )
            if problem is None and share is not None:
                slices.add(r, c)
            figures.append(
                CanaryFigure(
                    set_index=index,
                    output=spec.name,
                    error_ratio=ratio,
                    max_abs_err=worst,
                    problem=problem,
                )
            )
        if share is not None and (
            found := slices.problem(
                next(iter(pairs.values()))[0].dtype, gate.error_ratio_max, share
            )
        ):
            figures[-1] = replace(figures[-1], problem=found.problem)
    return figures


def _error(
    manifest: Manifest,
    output: str,
    index: int,
    r: Any,
    sums: Mapping[int, Sequence[Sums]],
    *,
    complete: bool,
) -> OutputError:
    """Error of an output in one set; of few elements, over all sets."""
    num_elements, own = math.prod(r.shape), sums[index][0]
    rmse, rms = own.rmse, own.rms
    if num_elements < POOL_BELOW:
        pool = Sums()
        for groups in sums.values():
            pool.include(groups[0])
        rmse, rms = (pool.rmse, pool.rms) if complete else (math.inf, 0.0)
    native = manifest.golden[index].native_rmse.get(output) or 0.0
    return OutputError(
        rmse=rmse, native_rmse=native, rms=rms, dtype=r.dtype, num_elements=num_elements
    )


def check_figures(manifest: Manifest, figures: Sequence[CanaryFigure]) -> None:
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
    inputs: Sequence[Mapping[str, Any]],
    payload_for: Callable[[Mapping[str, int]], Payload],
) -> list[int]:
    """The golden set with the fewest elements of each open payload."""
    sizes = [sum(math.prod(given.shape) for given in tensors.values()) for tensors in inputs]
    chosen: dict[str, int] = {}
    for index in sorted(range(len(inputs)), key=sizes.__getitem__):
        chosen.setdefault(payload_for(manifest.golden[index].point).path, index)
    return sorted(chosen.values())
