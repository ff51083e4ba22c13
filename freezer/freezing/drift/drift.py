"""Drift: distance of a candidate's outputs from the float64 reference, relative to the eager
model's own.

docs/measuring.md defines the figures and the gate. `freezer.compare.numerics` has the formula
(`judge_rmse`), and decides which magnitudes of an output are judged apart (`Magnitudes`). Every
slice along a dim but the first is also judged by its own rms. Outputs with fewer than 64 elements,
and those of models that draw random numbers, are pooled over all input sets. An output without
figures does not pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from freezer.compare.gate import (
    DIGITS,
    POOL_BELOW,
    OutputError,
    Sums,
    blocks,
    finite,
    judge_rmse,
    openvino_problem,
)
from freezer.compare.numerics import Magnitudes, comparable, distances, doubles, structure_problem
from freezer.compare.slices import Slices

STRIDES = "strides "
"""Start of the problem of a row whose strides differ."""

MAX_ADVISED_RATIO = 30.0
"""Largest `error_ratio_max` that a message recommends: a candidate that is further off computes
another function.
"""

ABSOLUTE = 1e-4
"""Distance from eager up to which outputs in which eager has no correct digits are judged by the
ratio alone: rounded zeros.
"""

CallKind = Literal["single", "sequence", "after-reset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """The drift limit, and whether the reference ran in float64."""

    error_ratio_max: float
    float64: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRow:
    """The drift of one output in one call: a row of evidence/drift.parquet. Most figures are None
    for integers and bools.

    Attributes:
        native_rmse: of eager against the reference; of integers and bools that eager draws, the
            difference between its runs.
        bound: limit on rmse; None where OpenVINO's bounds apply.
        problem: what failed, or None.
        num_threads, payload: thread count and payload path of the run.
        num_ties: elements that differ because rounding decides them (see `ties`); the figures are
            without them.
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
    num_ties: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """The drift of one candidate.

    Attributes:
        passed: whether every row passed.
        error_ratio, max_abs_err: maximum of all rows.
        sqnr_db: minimum of all rows; None if nothing differs.
        margin: minimum of bound / rmse; None if nothing differs.
        nearest_miss: the worst row of a failed candidate in one sentence, with the limit that would
            have passed.
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
        return {
            name: getattr(self, name)
            for name in ("error_ratio", "max_abs_err", "sqnr_db", "margin")
        }


@dataclass(frozen=True, kw_only=True)
class Call:
    """The output tensors of one call by the reference, by eager, and by the candidate once it has
    run.

    Attributes:
        noise_rmse: for each output, the largest difference between runs of eager, of integers and
            bools in all calls; 0 for a deterministic model.
    """

    kind: CallKind
    set_index: int
    reference: Sequence[Tensor]
    eager: Sequence[Tensor]
    noise_rmse: Sequence[float]
    candidate: Sequence[Tensor] = ()


def assess(
    recipe: str,
    names: Sequence[str],
    calls: Iterable[Call],
    gate: Gate,
    scales: Sequence[Sequence[float]],
) -> list[DriftRow]:
    """Measure the drift of every output of a candidate in every call.

    Args:
        recipe: the candidate's recipe.
        names: names of the outputs.
        calls: all calls, with the outputs in the order of `names`. They are compared one by one; no
            output is kept.
        gate: the limit.
        scales: for each output, see `scales_of`.
    """
    outputs = [_Output(gate, limits) for limits in scales]
    for call in calls:
        for index, (name, output) in enumerate(zip(names, outputs, strict=True)):
            num_elements = call.eager[index].numel()
            row = DriftRow(
                recipe=recipe,
                kind=call.kind,
                set_index=call.set_index,
                output=name,
                num_elements=num_elements,
            )
            output.add(row, call, index)
    return [row for output in outputs for row in output.rows()]


def scales_of(calls: Sequence[Call], index: int, *, float64: bool) -> tuple[float, ...]:
    """The magnitudes from which values of an output are judged apart, over all calls; see
    `Magnitudes`.
    """
    if not calls or not comparable(calls[0].eager[index]):
        return ()
    magnitudes = Magnitudes()
    for call in calls:
        magnitudes.add(call.reference[index], call.eager[index] if float64 else None)
    return magnitudes.limits(calls[0].eager[index].dtype)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """One output in one call.

    Attributes:
        row: with the problem of the structure, and without figures of errors.
        parts: sums of each part; none if it cannot be compared. Noise counts as an error of eager.
        against: distances of the parts from eager, where eager may have no correct digits.
        noisy: whether the model draws random numbers.
    """

    row: DriftRow
    dtype: torch.dtype
    parts: Sequence[Sums] = ()
    against: Sequence[Sums] = ()
    noisy: bool = False


class _Output:
    """One output of a candidate, over all calls."""

    def __init__(self, gate: Gate, limits: Sequence[float]) -> None:
        self._gate, self._limits = gate, limits
        self._compared: list[_Compared] = []
        self._slices: Slices | None = Slices(doubles, limits)
        self._empty = self._not_finite = True
        """Whether no call of eager has an element, or a finite one."""

    def add(self, row: DriftRow, call: Call, index: int) -> None:
        """Compare the output of one call."""
        e = call.eager[index]
        self._empty = self._empty and not e.numel()
        self._not_finite = (
            self._not_finite
            and comparable(e)
            and not any(e[block].isfinite().any() for block in blocks(e.shape))
        )
        item = _compared(row, call, index, self._limits, self._gate)
        self._compared.append(item)
        if not item.parts or item.row.problem or item.noisy:
            self._slices = None
        elif self._slices and call.kind == "single":
            self._slices.add(call.reference[index], call.candidate[index], e)

    def rows(self) -> list[DriftRow]:
        """The rows of all calls, judged."""
        pools: defaultdict[tuple[str, int], Sums] = defaultdict(Sums)
        for item in self._compared:
            for part, sums in enumerate(item.parts):
                pools[item.row.kind, part].include(sums)
        noisy = {item.row.kind for item in self._compared if item.noisy}
        rows = [self._judged(item, pools, noisy=item.row.kind in noisy) for item in self._compared]
        if self._not_finite and not self._empty:
            rows[0] = replace(
                rows[0],
                problem="eager returns only NaN or Inf, no output was compared; fix the model",
            )
        if self._slices and rows and not any(row.problem for row in rows):
            found = self._slices.problem(
                self._compared[0].dtype, self._gate.error_ratio_max if self._gate.float64 else None
            )
            rows[0] = replace(rows[0], **asdict(found)) if found else rows[0]
        return rows

    def _judged(
        self, item: _Compared, pools: Mapping[tuple[str, int], Sums], *, noisy: bool
    ) -> DriftRow:
        """Add the figures, the bound and the problem of the first part that does not pass, or else
        of the first part.
        """
        if item.row.problem:
            return item.row
        judged = []
        for part, sums in enumerate(item.parts):
            if sums.num_elements or not self._limits:
                pool = (
                    pools[item.row.kind, part] if noisy or sums.num_elements < POOL_BELOW else sums
                )
                against = item.against[part] if item.against and not noisy else None
                judged.append(self._part_judged(item, sums, pool, against, noisy=noisy))
        return next((row for row in judged if row.problem), judged[0] if judged else item.row)

    def _part_judged(
        self, item: _Compared, sums: Sums, pool: Sums, against: Sums | None, *, noisy: bool
    ) -> DriftRow:
        """Add the figures, the bound and the problem of one part."""
        gate, dtype, native = self._gate, item.dtype, pool.native_rmse
        if not all(math.isfinite(figure) for figure in (pool.rmse, native, pool.rms)):
            problem = "the squares of the values overflow, so the error cannot be measured"
            remedy = "" if math.isfinite(pool.rms) and math.isfinite(native) else "; fix the model"
            return replace(item.row, max_abs_err=sums.max_abs_err, problem=problem + remedy)
        figures = replace(sums.figures(), rmse=pool.rmse, rms=pool.rms)
        error = OutputError(
            rmse=pool.rmse,
            native_rmse=native,
            rms=pool.rms,
            dtype=dtype,
            num_elements=sums.num_elements,
        )
        ratio, bound = judge_rmse(error, gate.error_ratio_max)
        row = replace(
            item.row, **asdict(figures), native_rmse=native, error_ratio=ratio, bound=bound
        )
        if not gate.float64 and not noisy:
            return replace(
                row, bound=None, problem=openvino_problem(figures, dtype, sums.num_elements)
            )
        if pool.rmse > bound:
            return replace(row, problem=f"error_ratio {ratio:.3g} > {gate.error_ratio_max:g}")
        if native <= DIGITS * pool.rms or against is None or against.max_abs_err <= ABSOLUTE:
            return row
        apart = openvino_problem(
            against.figures(), dtype, against.num_elements
        )  # the ratio accepts anything of the right size
        found = f"eager has no correct digits here, and the distance from eager: {apart}"
        return replace(row, bound=None, problem=found) if apart else row


def _compared(
    row: DriftRow, call: Call, index: int, limits: Sequence[float], gate: Gate
) -> _Compared:
    if len(call.candidate) != len(call.eager):
        problem: str | None = f"{len(call.candidate)} outputs, eager gives {len(call.eager)}"
        return _Compared(
            row=replace(row, num_elements=0, problem=problem), dtype=call.eager[index].dtype
        )
    r, e, c, noise_rmse = (
        call.reference[index],
        call.eager[index],
        call.candidate[index],
        call.noise_rmse[index],
    )
    drawn = noise_rmse > 0 and not comparable(e)
    problem = structure_problem(e, c, drawn=drawn)
    # Where eager returns a view with gaps, its dense copy is right, too.
    if (
        problem is None
        and _strides(c) != _strides(e)
        and _strides(c) != _strides(torch.empty_like(e, device="meta"))
    ):
        problem = f"{STRIDES}{c.stride()}, eager's are {e.stride()}"
    row = replace(row, problem=problem, native_rmse=noise_rmse if drawn else None)
    if not comparable(e) or c.shape != e.shape:
        return _Compared(row=row, dtype=e.dtype)
    parts = distances(r, c, e, limits=limits)
    for sums in parts:
        sums.native += noise_rmse**2 * sums.num_elements
    doubtful = any(
        sums.num_elements < POOL_BELOW or sums.native_rmse > DIGITS * sums.rms for sums in parts
    )
    return _Compared(
        row=row if problem else replace(row, top1_agreement=_top1(r, c)),
        dtype=e.dtype,
        parts=parts,
        against=distances(e, c, limits=limits, by=r) if doubtful and gate.float64 else (),
        noisy=noise_rmse > 0,
    )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims of more than one element; the others are arbitrary."""
    return tuple(
        stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )


def _top1(r: Tensor, c: Tensor) -> float | None:
    """Share of rows whose largest score is at the same place; None if the output is not [rows,
    classes].
    """
    if r.dim() != 2 or r.shape[1] < 2 or r.shape[0] == 0 or r.is_complex():
        return None
    return float((r.argmax(1) == c.argmax(1)).double().mean())


def report(rows: Sequence[DriftRow], gate: Gate) -> DriftReport:
    """The drift of one candidate in all of its runs."""
    ratios = [row.error_ratio for row in rows if row.error_ratio is not None]
    errors = [row.max_abs_err for row in rows if row.max_abs_err is not None]
    return DriftReport(
        passed=bool(rows) and not any(row.problem for row in rows),
        error_ratio=finite(max(ratios, default=None)),
        max_abs_err=finite(max(errors, default=None)),
        sqnr_db=min((row.sqnr_db for row in rows if row.sqnr_db is not None), default=None),
        margin=finite(
            min(
                (row.bound / row.rmse for row in rows if row.bound is not None and row.rmse),
                default=None,
            )
        ),
        nearest_miss=_nearest_miss(rows, gate),
        rows=tuple(rows),
    )


def _nearest_miss(rows: Sequence[DriftRow], gate: Gate) -> str | None:
    """The worst row in one sentence, with the limit that would have passed, up to
    MAX_ADVISED_RATIO; None if all rows passed.
    """
    if not rows:
        return "no output was compared"
    failed = [row for row in rows if row.problem]
    if not failed:
        return None
    worst = max(failed, key=lambda row: (row.error_ratio is None, row.error_ratio or 0.0))
    several = len({(row.payload, row.num_threads) for row in rows}) > 1
    run = (
        f"{worst.kind}, {worst.payload} with {worst.num_threads} threads" if several else worst.kind
    )
    where = f"output {worst.output!r}, input set {worst.set_index} ({run}): {worst.problem}"
    ratio = worst.error_ratio
    if (
        ratio is None
        or worst.bound is None
        or not gate.error_ratio_max < ratio <= MAX_ADVISED_RATIO
    ):
        return where  # no error_ratio_max would have passed, or one that accepts another function
    return f"{where}; limits.error_ratio_max: {math.ceil(ratio)} would have passed"
