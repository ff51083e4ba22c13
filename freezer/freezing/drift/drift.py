"""Drift: distance of a candidate's outputs from the float64 reference, relative to the eager
model's own.

docs/reference/measuring.md defines the figures and the gate; `freezer.compare` has the formula, and
decides which parts of an output are judged apart. Outputs with fewer than 64 elements, and those of
models that draw random numbers, are pooled over all input sets. An output without figures does not
pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from freezer.codec import frozen
from freezer.compare import (
    DIGITS,
    POOL_BELOW,
    Gate,
    OutputError,
    Slices,
    Sums,
    Values,
    distances,
    judge_rmse,
    openvino_problem,
    structure_problem,
)
from freezer.freezing.drift.drift_report import DriftRow
from freezer.freezing.drift.runs import Call
from freezer.runtime.tensors import values_of

STRIDES = "strides "
"""Start of the problem of a row whose strides differ."""

OVERFLOW = "the squares of the values overflow, so the error cannot be measured"

MAX_TYPICAL = 2**16
"""Elements of which the median error is taken, at even distances."""

ABSOLUTE = 1e-4
"""Distance from eager up to which outputs in which eager has no correct digits are judged by the
ratio alone: rounded zeros.
"""


def assess(
    names: Sequence[str],
    calls: Iterable[Call],
    gate: Gate,
    scales: Sequence[Sequence[float]],
) -> list[DriftRow]:
    """Measure the drift of every output of a candidate in every call.

    Args:
        names: names of the outputs.
        calls: all calls, with the outputs in the order of `names`. They are compared one by one; no
            output is kept.
        gate: the limit.
        scales: for each output, see `scales_of`.
    """
    outputs = [_Output(name, gate, limits) for name, limits in zip(names, scales, strict=True)]
    for call in calls:
        for index, output in enumerate(outputs):
            output.add(call, index)
    return list(chain.from_iterable(output.rows() for output in outputs))


@frozen
class _Compared:
    """One output in one call.

    Attributes:
        row: the row with the problem of the structure, and without figures of errors.
        parts: sums of each part; none if it cannot be compared. Noise counts as an error of eager.
        against: distances of the parts from eager, where eager may have no correct digits.
        typical: why the typical error is too large; None if it is not.
    """

    row: DriftRow
    parts: Sequence[Sums]
    against: Sequence[Sums]
    typical: str | None


class _Output:
    """One output of a candidate, over all calls."""

    def __init__(self, name: str, gate: Gate, limits: Sequence[float]) -> None:
        self._name = name
        self._gate = gate
        self._limits = limits
        self._dtype = ""
        self._compared: list[_Compared] = []
        self._pools: defaultdict[tuple[str, int], Sums] = defaultdict(Sums)
        self._noisy: set[str] = set()  # kinds of calls with random numbers
        self._slices: Slices | None = Slices(limits)
        self._num_finite = 0

    def add(self, call: Call, index: int) -> None:
        """Compare the output of one call."""
        r = values_of(call.reference[index])
        e = values_of(call.eager[index])
        c = values_of(call.candidate[index])
        self._dtype = e.dtype
        self._num_finite += int(np.isfinite(e.array).sum())
        noise_rmse = call.noise_rmse[index]
        drawn = noise_rmse > 0 and not e.rounds
        problem = structure_problem(e, c, drawn=drawn)
        if problem is None:
            problem = _strides_problem(call.eager[index], call.candidate[index])
        row = DriftRow(
            kind=call.kind,
            set_index=call.set_index,
            output=self._name,
            num_elements=e.size,
            problem=problem,
            native_rmse=noise_rmse if drawn else None,
        )
        parts: Sequence[Sums] = ()
        against: Sequence[Sums] = ()
        if e.rounds and c.shape == e.shape:
            parts = distances(
                r,
                c,
                e,
                limits=self._limits,
            )
            for part, sums in enumerate(parts):
                sums.native += noise_rmse**2 * sums.num_elements
                self._pools[call.kind, part].include(sums)
            # eager may have no correct digits in a part, alone or pooled
            if self._gate.float64 and any(
                sums.num_elements < POOL_BELOW or sums.native_rmse > DIGITS * sums.rms
                for sums in parts
            ):
                against = distances(
                    e,
                    c,
                    limits=self._limits,
                    by=r,
                )
        typical = None
        if self._gate.float64 and parts and not problem and not noise_rmse:
            typical = _typical_problem(r, e, c, self._gate.error_ratio_max)
        self._compared.append(
            _Compared(
                row=row,
                parts=parts,
                against=against,
                typical=typical,
            )
        )
        if parts and noise_rmse > 0:
            self._noisy.add(call.kind)
        if noise_rmse > 0 or problem or not parts:
            self._slices = None
        elif self._slices and call.kind == "single":
            self._slices.add(r, c, e)

    def rows(self) -> list[DriftRow]:
        """The rows of all calls, judged."""
        rows = list(map(self._judged, self._compared))
        if not self._num_finite and any(row.num_elements for row in rows):
            problem = "eager returns only NaN or Inf, no output was compared; fix the model"
            rows[0] = replace(rows[0], problem=problem)
        if self._slices and not any(row.problem for row in rows):
            limit = self._gate.error_ratio_max if self._gate.float64 else None
            failed = self._slices.problem(self._dtype, limit)
            if failed:
                rows[0] = replace(rows[0], **asdict(failed))
        return rows

    def _judged(self, compared: _Compared) -> DriftRow:
        """Add the figures, the bound and the problem of the first part that does not pass, or else
        of the first part.
        """
        if compared.row.problem:
            return compared.row
        rows = []
        for part, sums in enumerate(compared.parts):
            if sums.num_elements or not self._limits:
                rows.append(self._part_judged(compared, part))
        failed = [row for row in rows if row.problem]
        row = [*failed, *rows, compared.row][0]
        if compared.typical and not failed:
            return replace(row, problem=compared.typical, bound=None)
        return row

    def _part_judged(self, compared: _Compared, part: int) -> DriftRow:
        """Add the figures, the bound and the problem of one part."""
        sums, kind = compared.parts[part], compared.row.kind
        noisy = kind in self._noisy
        pool = self._pools[kind, part] if noisy or sums.num_elements < POOL_BELOW else sums
        against = compared.against[part] if compared.against and not noisy else None
        row = replace(compared.row, max_abs_err=sums.max_abs_err)
        error = pool.error(self._dtype, sums.num_elements)
        if not all(map(math.isfinite, (error.rmse, error.native_rmse, error.rms))):
            return replace(row, problem=OVERFLOW)
        limit = self._gate.error_ratio_max
        ratio, allowed = judge_rmse(error, limit)
        bound: float | None = allowed
        if not self._gate.float64 and not noisy:
            problem, bound = openvino_problem(sums, error.dtype, error.rms), None
        elif error.rmse > allowed:
            problem = f"error_ratio {ratio:.3g} > {limit:g}"
        else:
            problem = _digits_problem(error, against)
            bound = None if problem else allowed
        return replace(
            row,
            max_rel_err=sums.max_rel_err,
            rmse=error.rmse,
            native_rmse=error.native_rmse,
            rms=error.rms,
            error_ratio=ratio,
            sqnr_db=sums.sqnr_db,
            cosine=sums.cosine,
            gain=sums.gain,
            bound=bound,
            problem=problem,
        )


def _typical_problem(r: Values, e: Values, c: Values, limit: float) -> str | None:
    """Why the median error is too large. Few elements in which rounding decides eager's answer
    (ties) make its rmse large, and must not widen the bound of all others.
    """
    if e.size < POOL_BELOW:
        return None
    step = math.ceil(e.size / MAX_TYPICAL)
    sampled = []
    for block in r.blocks():
        sampled.append([values.wide(block).ravel()[::step] for values in (r, e, c)])
    reference, eager, candidate = map(np.concatenate, zip(*sampled, strict=True))
    used = np.isfinite(reference) & np.isfinite(eager) & np.isfinite(candidate) & (reference != 0)
    if used.sum() < POOL_BELOW:
        return None
    values = reference[used]
    with np.errstate(over="ignore"):
        rms = float(np.sqrt(np.mean(abs(values) ** 2)))
    typical = OutputError(
        rmse=float(np.median(abs(candidate[used] - values))),
        native_rmse=float(np.median(abs(eager[used] - values))),
        rms=rms,
        dtype=e.dtype,
        num_elements=e.size,
    )
    ratio, allowed = judge_rmse(typical, limit)
    if typical.rmse <= allowed:
        return None
    return f"the median error is {ratio:.3g} times eager's, more than {limit:g}"


def _digits_problem(error: OutputError, against: Sums | None) -> str | None:
    """Why an output is too far from eager where eager has no correct digits; the ratio accepts
    anything of the right size there.
    """
    if against is None or error.native_rmse <= DIGITS * error.rms:
        return None
    if against.max_abs_err <= ABSOLUTE:
        return None
    apart = openvino_problem(against, error.dtype, against.rms)
    return apart and f"eager has no correct digits here, and the distance from eager: {apart}"


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
