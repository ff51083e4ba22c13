"""Compare the slices of an output along each dim but the first, each by its own rms; the drift gate
and the canary do.

Boxes in pixels beside class probabilities of 1e-4 have one rms, which hides errors of the
probabilities. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freezer.compare.gate import DIGITS, OutputError, absolute_bound, blocks, eps_of, judge_rmse

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
        doubles: converts a part of an output to numpy's float64 or complex128.
        limits: of `Magnitudes`. Values of the largest group are left out.
    """

    def __init__(
        self, doubles: Callable[[Any], NDArray[Any]], limits: Sequence[float] = ()
    ) -> None:
        self._doubles = doubles
        self._below = limits[-1] if limits else math.inf
        self._sums: dict[tuple[int, int], NDArray[np.float64]] = {}
        """By rank and dim: squared errors of the candidate and of eager, squares of the reference,
        and the count, each by place.
        """

    def add(self, r: Any, c: Any, e: Any = None) -> None:
        """Add the elements of one call that are finite in reference, candidate and, if known,
        eager.
        """
        by_axis: dict[int, NDArray[np.float64]] = {}
        for axis in range(1, len(r.shape)):
            known = self._sums.get((len(r.shape), axis), np.zeros((4, 0)))
            by_axis[axis] = np.pad(known, ((0, 0), (0, max(0, r.shape[axis] - known.shape[1]))))
            self._sums[len(r.shape), axis] = by_axis[axis]
        for block in blocks(r.shape) if by_axis else ():
            reference, candidate, eager = (
                self._doubles(part[block]) for part in (r, c, r if e is None else e)
            )
            with np.errstate(all="ignore"):  # of values that are not finite
                used = (
                    (abs(reference) < self._below)
                    & (abs(eager) < math.inf)
                    & (abs(candidate) < math.inf)
                )
                squares = [
                    np.where(used, abs(values) ** 2, 0.0)
                    for values in (candidate - reference, eager - reference, reference)
                ]
            for axis, sums in by_axis.items():
                others = tuple(dim for dim in range(len(r.shape)) if dim != axis)
                with np.errstate(all="ignore"):
                    for known, values in zip(sums, (*squares, used), strict=True):
                        known[block[axis]] += values.sum(others)

    def native_share(self) -> float | None:
        """The largest relative error of eager in a slice; None where eager has no correct digits in
        some, or none is judged.
        """
        worst = 0.0
        for _, native, power, num in self._sums.values():
            judged = (num >= MIN_SLICE) & (power > 0)
            with np.errstate(all="ignore"):
                worst = max([worst, *(native[judged] / power[judged]).tolist()])
        return math.sqrt(worst) if self._sums and worst <= DIGITS**2 else None

    def problem(
        self, dtype: Any, error_ratio_max: float | None, native_share: float | None = None
    ) -> SliceProblem | None:
        """The first slice that does not pass; None if all do. Slices where eager has no correct
        digits are not judged.

        Args:
            dtype: of the output; torch's, numpy's or its name.
            error_ratio_max: of the gate; None where eager is the reference. Slices that are zero
                but for rounding are unknown then, so only an error above 10% and above OpenVINO's
                absolute bound fails.
            native_share: relative error of eager to assume, where eager was not given.
        """
        eps = eps_of(dtype)
        for (_, axis), (wrong, measured, power, num) in self._sums.items():
            with np.errstate(all="ignore"):
                native = measured if native_share is None else native_share**2 * power
                large = (
                    (num >= MIN_SLICE)
                    & (native <= DIGITS**2 * power)
                    & (wrong > (SLICE_FACTOR * eps) ** 2 * power)
                )
                large &= (
                    wrong > absolute_bound(dtype) ** 2 * num
                    if error_ratio_max is None
                    else power > 0
                )
            for place in large.nonzero()[0].tolist():
                count = int(num[place])
                rmse, own, size = (
                    math.sqrt(float(values[place]) / count) for values in (wrong, native, power)
                )
                error = OutputError(
                    rmse=rmse,
                    native_rmse=SLICE_FACTOR * own,
                    rms=size,
                    dtype=dtype,
                    num_elements=count,
                )
                ratio, allowed = judge_rmse(error, error_ratio_max or 0.0)
                bound = None if error_ratio_max is None else allowed
                if not rmse <= (DIGITS * size if bound is None else bound):
                    text = f"values at {place} of dim {axis}, of {size:.3g}, are off by {rmse:.3g}"
                    return SliceProblem(
                        rmse=rmse,
                        native_rmse=own,
                        rms=size,
                        error_ratio=ratio,
                        bound=bound,
                        problem=text,
                    )
        return None
