"""Drift: distance of a candidate's outputs from the float64 reference, relative to the eager model's own.

With `r` the reference, `e` eager's output and `c` the candidate's, all compared in float64:

    rmse        = sqrt(mean (c - r)^2)          native_rmse = sqrt(mean (e - r)^2)
    error_ratio = rmse / max(native_rmse, eps * rms(r))
    passes when   error_ratio <= error_ratio_max,  or  rmse <= multiplier * native_rmse + tol / 10

The second rule is that of `same()` in PyTorch's dynamo benchmarks: multiplier 2, or 3 for half precision and small tensors; tol is
1e-4 (float32) or 1e-2 (half) of rms(r), for float64 the multiple of eps that float32 has. Outputs with fewer than 64 elements are
pooled over all input sets first, because the ratio of single elements is chance. If float64 cannot run, the reference is eager, and
the bounds are those of OpenVINO's output validation. An output without figures does not pass.

Outputs may contain fill values, such as a mask's -1e9 among logits of 10, which would dominate rms(r) and hide other errors. So
magnitudes with a wide gap between them are judged separately, each part by its own rms (`parts_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from freezer.numerics import (
    POOL_BELOW,
    OutputError,
    comparable,
    error_figures,
    in_double,
    judge_rmse,
    openvino_problem,
    parts_of,
    square_sum,
    structure_problem,
)

NOTHING_COMPARED = "no output was compared"

CallKind = Literal["single", "sequence", "after-reset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """The drift limit."""

    error_ratio_max: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRow:
    """The drift of one output in one call: a row of evidence/drift.parquet. Figures are None for integers and bools.

    Attributes:
        bound: limit on rmse; None where OpenVINO's bounds apply.
        problem: what failed, or None.
        num_threads, payload: thread count and payload path of the run.
    """

    recipe: str
    kind: CallKind
    set_index: int
    output: str
    num_elements: int
    max_abs_err: float | None = None
    max_rel_err: float | None = None
    rmse: float | None = None
    native_rmse: float | None = None
    rms: float | None = None
    error_ratio: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    gain: float | None = None
    top1_agreement: float | None = None
    bound: float | None = None
    problem: str | None = None
    num_threads: int = 0
    payload: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """The drift of one candidate.

    Attributes:
        passed: whether every row passed.
        error_ratio, max_abs_err: maximum of all rows.
        sqnr_db: minimum of all rows; None if nothing differs.
        margin: minimum of bound / rmse; None if nothing differs.
        nearest_miss: the worst row of a failed candidate in one sentence, with the limit that would have passed.
        rows: the evidence.
    """

    passed: bool
    error_ratio: float | None
    max_abs_err: float | None
    sqnr_db: float | None
    margin: float | None
    nearest_miss: str | None
    rows: tuple[DriftRow, ...]

    def summary(self) -> dict[str, Any]:
        """The figures in the JSON output, the manifest and MLflow."""
        return {name: getattr(self, name) for name in ("error_ratio", "max_abs_err", "sqnr_db", "margin")}


@dataclass(frozen=True, kw_only=True)
class Call:
    """The output tensors of one call by the reference, by eager, and by the candidate once it has run.

    Attributes:
        noise_rmse: for each output, the largest difference between runs of eager; 0 for a deterministic model.
    """

    kind: CallKind
    set_index: int
    reference: Sequence[Tensor]
    eager: Sequence[Tensor]
    noise_rmse: Sequence[float]
    candidate: Sequence[Tensor] = ()


def assess(recipe: str, names: Sequence[str], calls: Sequence[Call], gate: Gate, *, float64: bool) -> DriftReport:
    """Measure the drift of a candidate over all its calls.

    Args:
        recipe: the candidate's recipe.
        names: names of the outputs.
        calls: all calls, with the outputs in the order of `names`.
        gate: the limit.
        float64: whether the reference ran in float64.
    """
    rows: list[DriftRow] = []
    for index, name in enumerate(names):
        pools = _pools(calls, index, len(names))
        found = [_row(recipe, name, index, call, pools, gate, float64=float64) for call in calls]
        if found and _nothing_finite([call.eager[index] for call in calls]):
            found[0] = replace(found[0], problem=f"eager returns only NaN or Inf, {NOTHING_COMPARED}; fix the model")
        rows.extend(found)
    return _report(rows, gate)


def joined(reports: Sequence[DriftReport], gate: Gate) -> DriftReport:
    """Join the reports of several runs of a candidate."""
    return reports[0] if len(reports) == 1 else _report([row for report in reports for row in report.rows], gate)


def _nothing_finite(eager: Sequence[Tensor]) -> bool:
    """Whether an output has elements, but none in any call is finite."""
    return all(comparable(e) and not torch.isfinite(e).any() for e in eager) and any(e.numel() for e in eager)


class _Pool:
    """Squared errors of one part of an output, summed over all input sets."""

    def __init__(self) -> None:
        self.candidate = self.native = self.reference = 0.0
        self.num_elements = 0
        self.noisy = False

    def add(self, r: Tensor, e: Tensor, c: Tensor, noise_rmse: float) -> None:
        self.noisy = self.noisy or noise_rmse > 0
        self.candidate += square_sum(c - r)
        self.native += square_sum(e - r) + noise_rmse**2 * r.numel()
        self.reference += square_sum(r)
        self.num_elements += r.numel()


_Pools = dict[tuple[str, int], _Pool]
"""By kind of call and part."""


def _pools(calls: Sequence[Call], index: int, num_outputs: int) -> _Pools:
    pools: _Pools = {}
    for call in calls:
        r, e = call.reference[index], call.eager[index]
        c = call.candidate[index] if len(call.candidate) == num_outputs else None
        if c is None or not comparable(e) or c.shape != e.shape:
            continue
        for part, (r64, e64, c64) in _parts(r, e, c):
            pools.setdefault((call.kind, part), _Pool()).add(r64, e64, c64, call.noise_rmse[index])
    return pools


def _parts(r: Tensor, e: Tensor, c: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
    """The finite elements of reference, eager and candidate by part, flat and in double precision."""
    finite = torch.isfinite(e) & torch.isfinite(r) & torch.isfinite(c)
    r64, e64, c64 = (in_double(tensor)[finite] for tensor in (r, e, c))
    for part, chosen in enumerate(parts_of(r64, e.dtype)):
        yield part, (r64[chosen], e64[chosen], c64[chosen])


def _row(recipe: str, name: str, index: int, call: Call, pools: _Pools, gate: Gate, *, float64: bool) -> DriftRow:
    r, e, c = call.reference[index], call.eager[index], call.candidate[index] if index < len(call.candidate) else None
    row = DriftRow(recipe=recipe, kind=call.kind, set_index=call.set_index, output=name, num_elements=e.numel())
    if c is None or len(call.candidate) != len(call.eager):
        return replace(row, num_elements=0, problem=f"{len(call.candidate)} outputs, eager gives {len(call.eager)}")
    mismatch = structure_problem(e, c) or _stride_problem(e, c)
    if mismatch or not comparable(e):
        return replace(row, problem=mismatch)
    noise = call.noise_rmse[index]
    judged = [_judged(values, pools[call.kind, part], noise, e.dtype, gate, float64=float64) for part, values in _parts(r, e, c)]
    worst = next((item for item in judged if item["problem"]), judged[0])
    return replace(row, top1_agreement=_top1(r, c), **worst)


def _judged(
    values: tuple[Tensor, Tensor, Tensor], pool: _Pool, noise_rmse: float, dtype: torch.dtype, gate: Gate, *, float64: bool
) -> dict[str, Any]:
    """Figures, bound and problem of one part of an output in one call, by the names of DriftRow."""
    r, e, c = values
    figures = error_figures(r, c, eps=torch.finfo(dtype).eps)
    native = math.sqrt(square_sum(e - r) / max(r.numel(), 1) + noise_rmse**2)
    if pool.num_elements > 0 and (pool.noisy or r.numel() < POOL_BELOW):
        totals = (pool.candidate, pool.native, pool.reference)
        rmse, native, rms = (math.sqrt(total / pool.num_elements) for total in totals)
        figures = replace(figures, rmse=rmse, rms=rms)
    error = OutputError(rmse=figures.rmse, native_rmse=native, rms=figures.rms, dtype=dtype, num_elements=r.numel())
    ratio, bound = judge_rmse(error, gate.error_ratio_max)
    problem: str | None = None
    limit: float | None = bound
    if not all(math.isfinite(figure) for figure in (error.rmse, native, error.rms)):
        problem = "the squares of the values overflow, so the error cannot be measured; fix the model"
    elif not float64 and not pool.noisy:
        limit, problem = None, openvino_problem(figures, dtype)
    elif not error.rmse <= bound:
        problem = f"error_ratio {ratio:.3g} > {gate.error_ratio_max:g}"
    return {**asdict(figures), "native_rmse": native, "error_ratio": ratio, "bound": limit, "problem": problem}


def _stride_problem(e: Tensor, c: Tensor) -> str | None:
    return None if _strides(c) == _strides(e) else f"strides {c.stride()}, eager's are {e.stride()}"


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims of more than one element; the others are arbitrary."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _top1(r: Tensor, c: Tensor) -> float | None:
    """Share of rows whose largest score is at the same place; None if the output is not [rows, classes]."""
    if r.dim() != 2 or r.shape[1] < 2 or r.shape[0] == 0 or r.is_complex():
        return None
    return float((r.argmax(1) == c.argmax(1)).double().mean())


def _report(rows: Sequence[DriftRow], gate: Gate) -> DriftReport:
    failed = [row for row in rows if row.problem]
    ratios = [row.error_ratio for row in rows if row.error_ratio is not None]
    margins = [row.bound / row.rmse for row in rows if row.bound is not None and row.rmse]
    sqnrs = [row.sqnr_db for row in rows if row.sqnr_db is not None]
    errors = [row.max_abs_err for row in rows if row.max_abs_err is not None]
    return DriftReport(
        passed=bool(rows) and not failed,
        error_ratio=_finite(max(ratios, default=None)),
        max_abs_err=_finite(max(errors, default=None)),
        sqnr_db=min(sqnrs, default=None),
        margin=min(margins, default=None),
        nearest_miss=_nearest_miss(failed, gate) if failed else (None if rows else NOTHING_COMPARED),
        rows=tuple(rows),
    )


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _nearest_miss(failed: Sequence[DriftRow], gate: Gate) -> str:
    """The worst row in one sentence, with the smallest limit that would have passed."""
    worst = max(failed, key=lambda row: (row.error_ratio is None, row.error_ratio or 0.0))
    run = f"{worst.kind}, {worst.payload} with {worst.num_threads} threads" if worst.payload else worst.kind
    where = f"output {worst.output!r}, input set {worst.set_index} ({run}): {worst.problem}"
    ratio = worst.error_ratio
    if ratio is None or worst.bound is None or not gate.error_ratio_max < ratio < math.inf:
        return where  # no error_ratio_max would have passed
    return f"{where}; limits.error_ratio_max: {math.ceil(ratio)} would have passed"


def rows_as_columns(rows: Sequence[DriftRow]) -> dict[str, list[Any]]:
    """The evidence table: a list for each field of DriftRow."""
    return {name: [getattr(row, name) for row in rows] for name in DriftRow.__dataclass_fields__}
