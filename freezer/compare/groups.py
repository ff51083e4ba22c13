"""Parts of an output that are judged apart, each by its own rms: magnitudes and slices.

An output may mix scales: a mask's -1e9 among logits of 10, or boxes in pixels beside class
probabilities of 1e-4. The rms of the whole output hides errors of the small values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from freezer.codec import frozen
from freezer.compare.gate import (
    DIGITS,
    EPS,
    HALVES,
    POOL_BELOW,
    OutputError,
    Sums,
    judge_rmse,
    openvino_bounds,
)
from freezer.compare.outputs import Numbers, Values

SCALES_APART = 500.0
"""Values at least this many times the rms of all smaller ones are judged apart; see `Magnitudes`.
The power of two below them is compared, so values 1,000 times as large always are."""

HALF_SCALES_APART = 50.0
"""The same for half precision, whose tolerance is wider."""

MIN_SLICE = 8
"""Elements from which a slice is judged, without those that are zero: of a channel that a ReLU
hardly ever lets pass, eager's error may be zero by chance.
"""

SLICE_FACTOR = 3.0
"""Multiple of eager's error of a slice that is allowed: of many slices, some are off by chance."""


class Magnitudes:
    """Histogram of the magnitudes of one output over its input sets, by powers of two, which
    decides the groups to judge apart.
    """

    def __init__(self) -> None:
        self._bins: defaultdict[int, Numbers] = defaultdict(partial(np.zeros, 3))
        """Count, sum of squares, and sum of the eager model's squared errors, by b: 2 ** (b - 1) <=
        size < 2 ** b.
        """
        self._eager = False

    def add(self, r: Values, e: Values | None = None) -> None:
        """Count the finite elements of a reference that are not 0, with the errors of eager unless
        it is the reference.
        """
        self._eager = e is not None
        for block in r.blocks():
            reference = r.wide(block)
            eager = (e or r).wide(block)
            used = np.isfinite(reference) & np.isfinite(eager) & (reference != 0)
            sizes = abs(reference[used])
            with np.errstate(all="ignore"):  # squares may overflow
                squares = sizes**2
                errors = abs(eager[used] - reference[used]) ** 2
            _, exponents = np.frexp(sizes)
            lowest = int(exponents.min(initial=0))
            bins = exponents - lowest
            counts = np.bincount(bins)
            columns = np.stack([counts, np.bincount(bins, squares), np.bincount(bins, errors)])
            for index in counts.nonzero()[0].tolist():
                self._bins[index + lowest] += columns[:, index]

    def limits(self, dtype: str) -> tuple[float, ...]:
        """Magnitudes from which values of an output of a dtype are judged apart from all smaller
        ones, ascending.

        The smaller values must be at least two, and the eager model must have correct digits there:
        values that are zero but for rounding do not form a group. Where eager is the reference,
        they must be at least 64 or a tenth of all instead.
        """
        apart = HALF_SCALES_APART if dtype in HALVES else SCALES_APART
        least = 2
        if not self._eager:
            num_all = sum(float(sums[0]) for sums in self._bins.values())
            least = max(2, min(POOL_BELOW, math.ceil(num_all / 10)))
        limits = []
        num = power = errors = 0.0
        for exponent, sums in sorted(self._bins.items()):
            limit = 2.0 ** (exponent - 1)
            judged = num >= least and errors <= DIGITS**2 * power
            if judged and limit >= apart * math.sqrt(power / num):
                limits.append(limit)
            count, squares, wrong = sums.tolist()
            num += count
            power += squares
            errors += wrong
        return tuple(limits)


@frozen
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
        limits: limits of `Magnitudes`. Values of the largest group are left out.
    """

    def __init__(self, limits: Sequence[float] = ()) -> None:
        self._below = limits[-1] if limits else math.inf
        self._sums: dict[tuple[int, int], Numbers] = {}
        """By rank and dim: squared errors of the output and of eager, squares of the reference, and
        the count, each by index.
        """

    def add(
        self,
        r: Values,
        c: Values,
        e: Values | None = None,
    ) -> None:
        """Add the elements of one call that are finite in all of its outputs."""
        dims = range(len(r.shape))
        for axis in dims[1:]:
            known = self._sums.get((len(dims), axis), np.zeros((4, 0)))
            missing = max(0, r.shape[axis] - known.shape[1])
            self._sums[len(dims), axis] = np.pad(known, ((0, 0), (0, missing)))
        for block in r.blocks() if len(dims) > 1 else ():
            with np.errstate(all="ignore"):  # of values that are not finite
                parts = _squares(r.wide(block), c.wide(block), (e or r).wide(block), self._below)
                for axis in dims[1:]:
                    others = tuple(dim for dim in dims if dim != axis)
                    sums = [part.sum(others) for part in parts]
                    self._sums[len(dims), axis][:, block[axis]] += sums

    def native_share(self) -> float | None:
        """The largest relative error of eager in a slice; None where eager has no correct digits in
        some, or none is judged.
        """
        worst = 0.0
        for _, native, power, count in self._sums.values():
            judged = (count >= MIN_SLICE) & (power > 0)
            with np.errstate(all="ignore"):
                shares = native[judged] / power[judged]
            worst = max([worst, *shares.tolist()])
        if self._sums and worst <= DIGITS**2:
            return math.sqrt(worst)
        return None

    def problem(
        self,
        dtype: str,
        error_ratio_max: float | None,
        native_share: float | None = None,
    ) -> SliceProblem | None:
        """The first slice that does not pass; None if all do. Slices where eager has no correct
        digits are not judged.

        Args:
            dtype: dtype of the output.
            error_ratio_max: limit of the gate; None where eager is the reference. Slices that are
                zero but for rounding are unknown then, so only an error above 10% and above
                OpenVINO's absolute bound fails.
            native_share: relative error of eager to assume, where eager was not given.
        """
        for (_, axis), sums in self._sums.items():
            columns = sums.copy()
            if native_share is not None:
                with np.errstate(all="ignore"):
                    columns[1] = native_share**2 * columns[2]
            for index in _suspects(columns, dtype, float64=error_ratio_max is not None):
                wrong, native, power, count = columns[:, index].tolist()
                part = Sums(
                    num_elements=int(count),
                    noise=wrong,
                    native=native,
                    signal=power,
                )
                error = part.error(dtype, part.num_elements)
                problem = _slice_problem(error, error_ratio_max, f"at {index} of dim {axis}")
                if problem:
                    return problem
        return None


def _squares(
    r: Numbers,
    c: Numbers,
    e: Numbers,
    below: float,
) -> list[Numbers]:
    """Squared errors of the output and of eager, and squares of the reference, where it is below a
    limit and all are finite, and which of these are not zero.
    """
    used = (abs(r) < below) & np.isfinite(e) & np.isfinite(c)
    squares = [abs(values) ** 2 for values in (c - r, e - r, r)]
    return [*(np.where(used, values, 0.0) for values in squares), used & ((r != 0) | (c != 0))]


def _suspects(columns: Numbers, dtype: str, *, float64: bool) -> list[int]:
    """Indices of slices whose error rounding does not explain, and where eager has correct
    digits.
    """
    wrong, native, power, count = columns
    with np.errstate(all="ignore"):
        suspects = wrong > (SLICE_FACTOR * EPS[dtype]) ** 2 * power
        suspects &= count >= MIN_SLICE
        suspects &= native <= DIGITS**2 * power
        if float64:
            suspects &= power > 0
        else:
            suspects &= wrong > openvino_bounds(dtype).absolute ** 2 * count
    return [int(index) for index in suspects.nonzero()[0]]


def _slice_problem(
    error: OutputError, error_ratio_max: float | None, where: str
) -> SliceProblem | None:
    allowed_error = replace(error, native_rmse=SLICE_FACTOR * error.native_rmse)
    ratio, allowed = judge_rmse(allowed_error, error_ratio_max or 0.0)
    bound: float | None = allowed
    if error_ratio_max is None:
        allowed, bound = DIGITS * error.rms, None
    if error.rmse <= allowed:
        return None
    return SliceProblem(
        rmse=error.rmse,
        native_rmse=error.native_rmse,
        rms=error.rms,
        error_ratio=ratio,
        bound=bound,
        problem=f"values {where}, of {error.rms:.3g}, are off by {error.rmse:.3g}",
    )
