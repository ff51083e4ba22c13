"""Drift: distance of a candidate's outputs from the float64 reference, relative to the eager
model's own.

docs/measuring.md defines the figures and the gate; `freezer.compare` has the formula, and decides
which parts of an output are judged apart. Outputs with fewer than 64 elements, and those of models
that draw random numbers, are pooled over all input sets. An output without figures does not pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from freezer.compare import (
    DIGITS,
    POOL_BELOW,
    Gate,
    Magnitudes,
    OutputError,
    Slices,
    Sums,
    Values,
    distances,
    judge_rmse,
    openvino_problem,
    structure_problem,
)
from freezer.compare.tensor_values import comparable, values_of
from freezer.freezing.drift.drift_report import CallKind, DriftRow

STRIDES = "strides "
"""Start of the problem of a row whose strides differ."""

ABSOLUTE = 1e-4
"""Distance from eager up to which outputs in which eager has no correct digits are judged by the
ratio alone: rounded zeros.
"""


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
            row = DriftRow(
                recipe=recipe,
                kind=call.kind,
                set_index=call.set_index,
                output=name,
                num_elements=call.eager[index].numel(),
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
        eager = values_of(call.eager[index]) if float64 else None
        magnitudes.add(values_of(call.reference[index]), eager)
    return magnitudes.limits(values_of(calls[0].eager[index]).dtype)


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """One output in one call.

    Attributes:
        row: the row with the problem of the structure, and without figures of errors.
        parts: sums of each part; none if it cannot be compared. Noise counts as an error of eager.
        against: distances of the parts from eager, where eager may have no correct digits.
        noisy: whether the model draws random numbers.
    """

    row: DriftRow
    dtype: str
    parts: Sequence[Sums] = ()
    against: Sequence[Sums] = ()
    noisy: bool = False


class _Output:
    """One output of a candidate, over all calls."""

    def __init__(self, gate: Gate, limits: Sequence[float]) -> None:
        self._gate, self._limits = gate, limits
        self._compared: list[_Compared] = []
        self._slices: Slices | None = Slices(limits)
        self._num_elements = self._num_finite = 0

    def add(self, row: DriftRow, call: Call, index: int) -> None:
        """Compare the output of one call."""
        e = values_of(call.eager[index])
        self._num_elements += e.array.size
        self._num_finite += int(np.count_nonzero(np.isfinite(e.array)))
        if len(call.candidate) != len(call.eager):
            problem = f"{len(call.candidate)} outputs, eager gives {len(call.eager)}"
            row = replace(row, num_elements=0, problem=problem)
            compared = _Compared(row=row, dtype=e.dtype)
        else:
            compared = self._compare(row, call, index, e)
        self._compared.append(compared)
        if not compared.parts or compared.row.problem or compared.noisy:
            self._slices = None
        elif self._slices and call.kind == "single":
            r, c = values_of(call.reference[index]), values_of(call.candidate[index])
            self._slices.add(r, c, e)

    def _compare(self, row: DriftRow, call: Call, index: int, e: Values) -> _Compared:
        r, c = values_of(call.reference[index]), values_of(call.candidate[index])
        noise_rmse = call.noise_rmse[index]
        drawn = noise_rmse > 0 and not e.rounds
        problem = structure_problem(e, c, drawn=drawn)
        problem = problem or _strides_problem(call.eager[index], call.candidate[index])
        row = replace(row, problem=problem, native_rmse=noise_rmse if drawn else None)
        if not e.rounds or c.array.shape != e.array.shape:
            return _Compared(row=row, dtype=e.dtype)
        parts = distances(r, c, e, limits=self._limits)
        for sums in parts:
            sums.native += noise_rmse**2 * sums.num_elements
        if not problem:
            row = replace(row, top1_agreement=_top1(r, c))
        against: Sequence[Sums] = ()
        if self._gate.float64 and any(_is_doubtful(sums) for sums in parts):
            against = distances(e, c, limits=self._limits, by=r)
        return _Compared(row=row, dtype=e.dtype, parts=parts, against=against, noisy=noise_rmse > 0)

    def rows(self) -> list[DriftRow]:
        """The rows of all calls, judged."""
        pools: defaultdict[tuple[str, int], Sums] = defaultdict(Sums)
        for compared in self._compared:
            for part, sums in enumerate(compared.parts):
                pools[compared.row.kind, part].include(sums)
        noisy_kinds = {compared.row.kind for compared in self._compared if compared.noisy}
        rows = []
        for compared in self._compared:
            noisy = compared.row.kind in noisy_kinds
            rows.append(self._judged(compared, pools, noisy=noisy))
        if self._num_elements and not self._num_finite:
            problem = "eager returns only NaN or Inf, no output was compared; fix the model"
            rows[0] = replace(rows[0], problem=problem)
        if self._slices and rows and not any(row.problem for row in rows):
            limit = self._gate.error_ratio_max if self._gate.float64 else None
            failed = self._slices.problem(self._compared[0].dtype, limit)
            if failed:
                rows[0] = replace(rows[0], **asdict(failed))
        return rows

    def _judged(
        self, compared: _Compared, pools: Mapping[tuple[str, int], Sums], *, noisy: bool
    ) -> DriftRow:
        """Add the figures, the bound and the problem of the first part that does not pass, or else
        of the first part.
        """
        if compared.row.problem:
            return compared.row
        rows = []
        for part, sums in enumerate(compared.parts):
            if self._limits and not sums.num_elements:
                continue
            pool = sums
            if noisy or sums.num_elements < POOL_BELOW:
                pool = pools[compared.row.kind, part]
            against = compared.against[part] if compared.against and not noisy else None
            rows.append(self._part_judged(compared, sums, pool, against, noisy=noisy))
        failed = [row for row in rows if row.problem]
        return [*failed, *rows, compared.row][0]

    def _part_judged(
        self, compared: _Compared, sums: Sums, pool: Sums, against: Sums | None, *, noisy: bool
    ) -> DriftRow:
        """Add the figures, the bound and the problem of one part."""
        gate, dtype, native = self._gate, compared.dtype, pool.native_rmse
        if not all(math.isfinite(figure) for figure in (pool.rmse, native, pool.rms)):
            problem = "the squares of the values overflow, so the error cannot be measured"
            if not math.isfinite(pool.rms) or not math.isfinite(native):
                problem += "; fix the model"
            return replace(compared.row, max_abs_err=sums.max_abs_err, problem=problem)
        error = OutputError(
            rmse=pool.rmse,
            native_rmse=native,
            rms=pool.rms,
            dtype=dtype,
            num_elements=sums.num_elements,
        )
        ratio, bound = judge_rmse(error, gate.error_ratio_max)
        row = replace(
            compared.row,
            max_abs_err=sums.max_abs_err,
            max_rel_err=sums.max_rel_err,
            rmse=pool.rmse,
            native_rmse=native,
            rms=pool.rms,
            error_ratio=ratio,
            sqnr_db=sums.sqnr_db,
            cosine=sums.cosine,
            gain=sums.gain,
        )
        if not gate.float64 and not noisy:
            return replace(row, problem=openvino_problem(sums, dtype, pool.rms))
        row = replace(row, bound=bound)
        if pool.rmse > bound:
            return replace(row, problem=f"error_ratio {ratio:.3g} > {gate.error_ratio_max:g}")
        if native <= DIGITS * pool.rms or against is None or against.max_abs_err <= ABSOLUTE:
            return row
        # The ratio accepts anything of the right size here.
        apart = openvino_problem(against, dtype, against.rms)
        if apart is None:
            return row
        problem = f"eager has no correct digits here, and the distance from eager: {apart}"
        return replace(row, bound=None, problem=problem)


def _is_doubtful(sums: Sums) -> bool:
    """Whether eager may have no correct digits in a part, alone or pooled."""
    return sums.num_elements < POOL_BELOW or sums.native_rmse > DIGITS * sums.rms


def _strides_problem(e: Tensor, c: Tensor) -> str | None:
    """Where eager returns a view with gaps, its dense copy is right, too."""
    dense = torch.empty_like(e, device="meta")
    if _strides(c) in (_strides(e), _strides(dense)):
        return None
    return f"{STRIDES}{c.stride()}, eager's are {e.stride()}"


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dims of more than one element; the others are arbitrary."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride for stride, size in pairs if size > 1)


def _top1(r: Values, c: Values) -> float | None:
    """Share of rows whose largest score is at the same place; None if the output is not [rows,
    classes].
    """
    scores = r.array
    if scores.ndim != 2 or scores.shape[1] < 2 or not len(scores) or scores.dtype.kind == "c":
        return None
    return float((scores.argmax(1) == c.array.argmax(1)).mean())
