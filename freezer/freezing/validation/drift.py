"""Drift: distance of a candidate's outputs from the float64 reference, relative to the eager model's own.

docs/measuring.md defines the figures and the gate. `freezer.numerics` has the formula (`judge_rmse`), and decides which magnitudes
of an output are judged apart (`Magnitudes`). Every slice along a dim but the first is also judged by its own rms. Outputs with
fewer than 64 elements, and those of models that draw random numbers, are pooled over all input sets. An output without figures does
not pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from freezer.numerics import (
    DIGITS,
    POOL_BELOW,
    Magnitudes,
    OutputError,
    comparable,
    error_figures,
    in_double,
    judge_rmse,
    openvino_problem,
    parts,
    square_sum,
    structure_problem,
)

STRIDES = "strides "
"""Start of the problem of a row whose strides differ."""

MAX_ADVISED_RATIO = 30.0
"""Largest `error_ratio_max` that a message recommends: a candidate that is further off computes another function."""

ABSOLUTE = 1e-4
"""Distance from eager up to which outputs in which eager has no correct digits are judged by the ratio alone: rounded zeros."""

CallKind = Literal["single", "sequence", "after-reset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """The drift limit, and whether the reference ran in float64."""

    error_ratio_max: float
    float64: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRow:
    """The drift of one output in one call: a row of evidence/drift.parquet. Most figures are None for integers and bools.

    Attributes:
        native_rmse: of eager against the reference; of integers and bools that eager draws, the difference between its runs.
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


def assess(recipe: str, names: Sequence[str], calls: Sequence[Call], gate: Gate) -> list[DriftRow]:
    """Measure the drift of every output of a candidate in every call.

    Args:
        recipe: the candidate's recipe.
        names: names of the outputs.
        calls: all calls, with the outputs in the order of `names`.
        gate: the limit.
    """
    rows: list[DriftRow] = []
    for index, name in enumerate(names):
        eager = [call.eager[index] for call in calls]
        limits = scales_of(calls, index, float64=gate.float64)
        pools = _pools(calls, index, limits)
        row = DriftRow(recipe=recipe, kind="single", set_index=0, output=name, num_elements=0, native_rmse=_drawn(calls, index))
        found = [
            _judged(
                replace(row, kind=call.kind, set_index=call.set_index, num_elements=e.numel()),
                call,
                index,
                pools,
                limits,
                gate,
            )
            for call, e in zip(calls, eager, strict=True)
        ]
        if all(comparable(e) and not e.isfinite().any() for e in eager) and any(e.numel() for e in eager):
            found[0] = replace(found[0], problem="eager returns only NaN or Inf, no output was compared; fix the model")
        rows += _with_slices(found, calls, index, limits, gate)
    return rows


def _drawn(calls: Sequence[Call], index: int) -> float | None:
    """The noise of integers or bools that eager draws; None for other outputs."""
    noise = max((call.noise_rmse[index] for call in calls), default=0.0)
    return noise if noise > 0 and not comparable(calls[0].eager[index]) else None


def scales_of(calls: Sequence[Call], index: int, *, float64: bool) -> tuple[float, ...]:
    """The magnitudes from which values of an output are judged apart, over all calls; see `Magnitudes`."""
    if not calls or not comparable(calls[0].eager[index]):
        return ()
    magnitudes = Magnitudes()
    for call in calls:
        magnitudes.add(call.reference[index], call.eager[index] if float64 else None)
    return magnitudes.limits(calls[0].eager[index].dtype)


class _Pool:
    """Squared errors of one part of an output, summed over input sets."""

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

    def means(self) -> tuple[float, float, float]:
        """Rmse of the candidate and of eager, and rms of the reference."""
        rmse, native, rms = (math.sqrt(s / max(self.num_elements, 1)) for s in (self.candidate, self.native, self.reference))
        return rmse, native, rms


_Pools = Mapping[tuple[str, int], _Pool]
"""By kind of call and part."""


def _pools(calls: Sequence[Call], index: int, limits: Sequence[float]) -> _Pools:
    pools: defaultdict[tuple[str, int], _Pool] = defaultdict(_Pool)
    for call in calls:
        e = call.eager[index]
        if len(call.candidate) == len(call.eager) and comparable(e) and call.candidate[index].shape == e.shape:
            for part, (r64, e64, c64) in enumerate(_parts(call, index, limits)):
                pools[call.kind, part].add(r64, e64, c64, call.noise_rmse[index])
    return pools


def _parts(call: Call, index: int, limits: Sequence[float]) -> list[tuple[Tensor, ...]]:
    """The parts of reference, eager and candidate."""
    return parts(call.reference[index], call.eager[index], call.candidate[index], limits=limits)


def _judged(row: DriftRow, call: Call, index: int, pools: _Pools, limits: Sequence[float], gate: Gate) -> DriftRow:
    """Add the figures, the bound and the problem of the first part that does not pass, or else of the first part."""
    if len(call.candidate) != len(call.eager):
        return replace(row, num_elements=0, problem=f"{len(call.candidate)} outputs, eager gives {len(call.eager)}")
    e, c = call.eager[index], call.candidate[index]
    problem = structure_problem(e, c, drawn=row.native_rmse is not None)
    if problem is None and _strides(c) != _strides(e):
        problem = f"{STRIDES}{c.stride()}, eager's are {e.stride()}"
    if problem or not comparable(e):
        return replace(row, problem=problem)
    row = replace(row, top1_agreement=_top1(call.reference[index], c))
    noise_rmse = call.noise_rmse[index]
    judged = [
        _part_judged(row, values, pools[row.kind, part], noise_rmse, e.dtype, gate)
        for part, values in enumerate(_parts(call, index, limits))
        if values[0].numel() or not limits
    ]
    return next((item for item in judged if item.problem), judged[0] if judged else row)


def _part_judged(
    row: DriftRow, values: tuple[Tensor, ...], pool: _Pool, noise_rmse: float, dtype: torch.dtype, gate: Gate
) -> DriftRow:
    """Add the figures, the bound and the problem of one part."""
    r, e, c = values
    if not pool.noisy and r.numel() >= POOL_BELOW:
        pool = _Pool()
        pool.add(r, e, c, noise_rmse)
    rmse, native, rms = pool.means()
    figures = replace(error_figures(r, c, eps=torch.finfo(dtype).eps), rmse=rmse, rms=rms)
    error = OutputError(rmse=rmse, native_rmse=native, rms=rms, dtype=dtype, num_elements=r.numel())
    ratio, bound = judge_rmse(error, gate.error_ratio_max)
    row = replace(row, **asdict(figures), native_rmse=native, error_ratio=ratio, bound=bound)
    if not all(math.isfinite(figure) for figure in (rmse, native, rms)):
        return replace(row, problem="the squares of the values overflow, so the error cannot be measured; fix the model")
    if not gate.float64 and not pool.noisy:
        return replace(row, bound=None, problem=openvino_problem(figures, dtype))
    if rmse > bound:
        return replace(row, problem=f"error_ratio {ratio:.3g} > {gate.error_ratio_max:g}")
    if native > DIGITS * rms and not pool.noisy:  # such a ratio accepts anything of the right size
        against = error_figures(e, c, eps=torch.finfo(dtype).eps)
        if against.max_abs_err > ABSOLUTE and (problem := openvino_problem(against, dtype)):
            return replace(row, bound=None, problem=f"eager has no correct digits here, and the distance from eager: {problem}")
    return row


MIN_SLICE = 8
"""Elements that a slice must have over all input sets; the ratio of two errors of fewer is chance."""

SLICE_FACTOR = 3.0
"""Factor on the eager model's error in a slice: an output has many slices, of few elements each."""


def _with_slices(rows: list[DriftRow], calls: Sequence[Call], index: int, limits: Sequence[float], gate: Gate) -> list[DriftRow]:
    """Judge every slice along each dim but the first by its own rms, over the single calls; the first row gets the problem.

    Boxes in pixels beside class probabilities of 1e-4 have one rms, which hides the probabilities. Slices where eager has no
    correct digits are not judged, so neither are those of a model without a float64 reference or with random numbers.
    """
    singles = [call for call in calls if call.kind == "single"]
    first = singles[0].eager[index] if singles else None
    if not gate.float64 or first is None or not comparable(first) or any(row.problem for row in rows):
        return rows
    if any(call.noise_rmse[index] > 0 or call.eager[index].dim() != first.dim() for call in singles):
        return rows
    sums: dict[int, Tensor] = {}
    for call in singles:
        r, e, c = (in_double(outputs[index]) for outputs in (call.reference, call.eager, call.candidate))
        used = r.isfinite() & e.isfinite() & c.isfinite() & (r.abs() < (limits[-1] if limits else math.inf))
        squares = [torch.where(used, values.abs() ** 2, 0.0) for values in (c - r, e - r, r)]
        for axis in range(1, first.dim()):
            others = [dim for dim in range(first.dim()) if dim != axis]
            found = torch.stack([values.sum(others) for values in (*squares, used.double())])
            known = sums.get(axis, found.new_zeros(4, 0))
            width = max(known.shape[1], found.shape[1])
            sums[axis] = sum(
                (torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in (known, found)), found.new_zeros(())
            )
    eps = torch.finfo(first.dtype).eps
    for axis, (wrong, native, power, num) in sums.items():
        large = (num >= MIN_SLICE) & (power > 0) & (native <= DIGITS**2 * power) & (wrong > (SLICE_FACTOR * eps) ** 2 * power)
        for place in large.nonzero().flatten().tolist():
            count = int(num[place])
            rmse, own, size = (math.sqrt(float(values[place]) / count) for values in (wrong, native, power))
            error = OutputError(rmse=rmse, native_rmse=SLICE_FACTOR * own, rms=size, dtype=first.dtype, num_elements=count)
            ratio, bound = judge_rmse(error, gate.error_ratio_max)
            if not rmse <= bound:
                problem = f"values at {place} of dim {axis}, of {size:.3g}, are off by {rmse:.3g}"
                failed = replace(rows[0], rmse=rmse, native_rmse=own, rms=size, error_ratio=ratio, bound=bound, problem=problem)
                return [failed, *rows[1:]]
    return rows


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims of more than one element; the others are arbitrary."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _top1(r: Tensor, c: Tensor) -> float | None:
    """Share of rows whose largest score is at the same place; None if the output is not [rows, classes]."""
    if r.dim() != 2 or r.shape[1] < 2 or r.shape[0] == 0 or r.is_complex():
        return None
    return float((r.argmax(1) == c.argmax(1)).double().mean())


def report(rows: Sequence[DriftRow], gate: Gate) -> DriftReport:
    """The drift of one candidate in all of its runs."""
    ratios = [row.error_ratio for row in rows if row.error_ratio is not None]
    errors = [row.max_abs_err for row in rows if row.max_abs_err is not None]
    return DriftReport(
        passed=bool(rows) and not any(row.problem for row in rows),
        error_ratio=_finite(max(ratios, default=None)),
        max_abs_err=_finite(max(errors, default=None)),
        sqnr_db=min((row.sqnr_db for row in rows if row.sqnr_db is not None), default=None),
        margin=min((row.bound / row.rmse for row in rows if row.bound is not None and row.rmse), default=None),
        nearest_miss=_nearest_miss(rows, gate),
        rows=tuple(rows),
    )


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _nearest_miss(rows: Sequence[DriftRow], gate: Gate) -> str | None:
    """The worst row in one sentence, with the limit that would have passed, up to MAX_ADVISED_RATIO; None if all rows passed."""
    if not rows:
        return "no output was compared"
    failed = [row for row in rows if row.problem]
    if not failed:
        return None
    worst = max(failed, key=lambda row: (row.error_ratio is None, row.error_ratio or 0.0))
    several = len({(row.payload, row.num_threads) for row in rows}) > 1
    run = f"{worst.kind}, {worst.payload} with {worst.num_threads} threads" if several else worst.kind
    where = f"output {worst.output!r}, input set {worst.set_index} ({run}): {worst.problem}"
    ratio = worst.error_ratio
    if ratio is None or worst.bound is None or not gate.error_ratio_max < ratio <= MAX_ADVISED_RATIO:
        return where  # no error_ratio_max would have passed, or one that accepts another function
    return f"{where}; limits.error_ratio_max: {math.ceil(ratio)} would have passed"
