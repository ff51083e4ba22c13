"""Compare the slices of an output along each dim but the first, each by its own rms; the drift gate and the canary do.

Boxes in pixels beside class probabilities of 1e-4 have one rms, which hides errors of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freezer.numerics import DIGITS, OutputError, absolute_bound, blocks, in_double, judge_rmse

MIN_SLICE = 8
"""Elements from which a slice is judged."""

SLICE_FACTOR = 3.0
"""Multiple of eager's error of a slice that is allowed: of many slices, some are off by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceProblem:
    """A slice that does not pass: its figures (those of a drift row), and the problem in words."""

    rmse: float
    native_rmse: float
    rms: float
    error_ratio: float
    bound: float | None
    problem: str


class Slices:
    """Squared errors of every slice of an output along each dim but the first, over several calls.

    Args:
        limits: of `Magnitudes`. Values of the largest group are left out.
    """

    def __init__(self, limits: Sequence[float] = ()) -> None:
        self._below = limits[-1] if limits else math.inf
        self._sums: dict[tuple[int, int], Tensor] = {}
        """By rank and dim: squared errors of the candidate and of eager, squares of the reference, and the count, each by place."""

    def add(self, r: Tensor, c: Tensor, e: Tensor | None = None) -> None:
        """Add the elements of one call that are finite in reference, candidate and, if known, eager."""
        by_axis: dict[int, Tensor] = {}
        for axis in range(1, r.dim()):
            known = self._sums.get((r.dim(), axis), torch.zeros(4, 0, dtype=torch.float64))
            by_axis[axis] = torch.nn.functional.pad(known, (0, max(0, r.shape[axis] - known.shape[1])))
            self._sums[r.dim(), axis] = by_axis[axis]
        for block in blocks(r.shape) if by_axis else ():
            reference, candidate, eager = (in_double(tensor[block]) for tensor in (r, c, r if e is None else e))
            used = (reference.abs() < self._below) & (eager.abs() < math.inf) & (candidate.abs() < math.inf)
            squares = [
                torch.where(used, values.abs() ** 2, 0.0) for values in (candidate - reference, eager - reference, reference)
            ]
            for axis, sums in by_axis.items():
                others = [dim for dim in range(r.dim()) if dim != axis]
                for known, values in zip(sums, (*squares, used.double()), strict=True):
                    known[block[axis]] += values.sum(others)

    def native_share(self) -> float | None:
        """The largest relative error of eager in a slice; None where eager has no correct digits in some, or none is judged."""
        worst = 0.0
        for _, native, power, num in self._sums.values():
            judged = (num >= MIN_SLICE) & (power > 0)
            worst = max([worst, *(native[judged] / power[judged]).tolist()])
        return math.sqrt(worst) if self._sums and worst <= DIGITS**2 else None

    def problem(self, dtype: torch.dtype, error_ratio_max: float | None, native_share: float | None = None) -> SliceProblem | None:
        """The first slice that does not pass; None if all do. Slices where eager has no correct digits are not judged.

        Args:
            dtype: of the output.
            error_ratio_max: of the gate; None where eager is the reference. Slices that are zero but for rounding are unknown
                then, so only an error above 10% and above OpenVINO's absolute bound fails.
            native_share: relative error of eager to assume, where eager was not given.
        """
        eps = torch.finfo(dtype).eps
        for (_, axis), (wrong, measured, power, num) in self._sums.items():
            native = measured if native_share is None else native_share**2 * power
            large = (num >= MIN_SLICE) & (native <= DIGITS**2 * power) & (wrong > (SLICE_FACTOR * eps) ** 2 * power)
            large &= wrong > absolute_bound(dtype) ** 2 * num if error_ratio_max is None else power > 0
            for place in large.nonzero().flatten().tolist():
                count = int(num[place])
                rmse, own, size = (math.sqrt(float(values[place]) / count) for values in (wrong, native, power))
                error = OutputError(rmse=rmse, native_rmse=SLICE_FACTOR * own, rms=size, dtype=dtype, num_elements=count)
                ratio, allowed = judge_rmse(error, error_ratio_max or 0.0)
                bound = None if error_ratio_max is None else allowed
                if not rmse <= (DIGITS * size if bound is None else bound):
                    text = f"values at {place} of dim {axis}, of {size:.3g}, are off by {rmse:.3g}"
                    return SliceProblem(rmse=rmse, native_rmse=own, rms=size, error_ratio=ratio, bound=bound, problem=text)
        return None
