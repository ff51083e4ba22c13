"""The gate: decide from figures alone whether an output is close enough to its reference.

The judge, the canary and the C++ example all apply `judge_rmse`. A dtype is the
name that torch gives it. docs/reference/measuring.md explains the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from freezer.codec import frozen

_T = TypeVar("_T")

POOL_BELOW = 64
"""Outputs with fewer elements are pooled over all input sets: the ratio of two errors of a few
elements is chance.
"""

SMALL_TENSOR = 1000
"""Elements below which dynamo's `same()` applies the larger multiplier."""

DIGITS = 0.1
"""Relative error of the eager model from which its values have no correct digits: they are zero but
for rounding.
"""

EAGER_REFERENCE_TOL = 1e-3
"""Relative error allowed where the reference is eager: OpenVINO's bound for float32.

Lower precisions use their eps.
"""

HALVES = ("float16", "bfloat16")

EPS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
"""By dtype, the distance from 1 to the next number."""


@frozen
class OutputError:
    """Error of one output, as the gate judges it.

    Attributes:
        rmse: root-mean-square distance from the reference.
        native_rmse: the same for the eager model.
        rms: root mean square of the reference.
        dtype: dtype of the output.
        num_elements: elements of the output in one input set.
    """

    rmse: float
    native_rmse: float
    rms: float
    dtype: str
    num_elements: int


@frozen
class Gate:
    """The drift limit, and whether the reference ran in float64; otherwise it is eager."""

    error_ratio_max: float
    float64: bool


@dataclass(kw_only=True, slots=True)
class Sums:
    """Sums over elements of an output `c` and its reference `r`, from which all figures follow.

    Attributes:
        noise, signal, power: sums of |c - r|^2, |r|^2 and |c|^2.
        native: sum of |e - r|^2 for the eager model's output `e`; 0 without it.
        inner: sum of the real part of c times the conjugate of r.
        max_abs_err, max_rel_err: maxima; see docs/reference/measuring.md.
    """

    num_elements: int = 0
    noise: float = 0.0
    signal: float = 0.0
    power: float = 0.0
    native: float = 0.0
    inner: float = 0.0
    max_abs_err: float = 0.0
    max_rel_err: float = 0.0

    def include(self, other: Sums) -> None:
        """Add the sums of other elements."""
        self.num_elements += other.num_elements
        self.noise += other.noise
        self.signal += other.signal
        self.power += other.power
        self.native += other.native
        self.inner += other.inner
        self.max_abs_err = max(self.max_abs_err, other.max_abs_err)
        self.max_rel_err = max(self.max_rel_err, other.max_rel_err)

    @property
    def rmse(self) -> float:
        """Root-mean-square distance from the reference."""
        return self._root_mean(self.noise)

    @property
    def native_rmse(self) -> float:
        """The same for the eager model."""
        return self._root_mean(self.native)

    @property
    def rms(self) -> float:
        """Root mean square of the reference."""
        return self._root_mean(self.signal)

    def error(self, dtype: str, num_elements: int) -> OutputError:
        """The error of an output of a dtype, with so many elements in one input set."""
        return OutputError(
            rmse=self.rmse,
            native_rmse=self.native_rmse,
            rms=self.rms,
            dtype=dtype,
            num_elements=num_elements,
        )

    def _root_mean(self, squares: float) -> float:
        return math.sqrt(squares / max(self.num_elements, 1))

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-noise ratio; None where it is undefined or overflows, as of the next two."""
        if not _usable(self.signal, self.noise):
            return None
        return 10 * (math.log10(self.signal) - math.log10(self.noise))

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between output and reference."""
        if not _usable(self.signal, self.power):
            return None
        return self.inner / math.sqrt(self.signal) / math.sqrt(self.power)

    @property
    def gain(self) -> float | None:
        """Least-squares scale factor from the reference to the output; None if that is zero."""
        if not _usable(self.signal):
            return None
        return finite(self.inner / self.signal)


def _usable(*squares: float) -> bool:
    """Whether sums of squares are positive and did not overflow."""
    return all(0 < value < math.inf for value in squares)


class OpenVinoBounds(NamedTuple):
    """OpenVINO's bounds: least cosine, and the absolute and relative error of which one must
    hold.
    """

    cosine: float
    absolute: float
    relative: float


_OPENVINO = {
    "float16": OpenVinoBounds(
        cosine=0.995,
        absolute=1e-2,
        relative=5e-2,
    ),
    "bfloat16": OpenVinoBounds(
        cosine=0.99,
        absolute=2e-2,
        relative=1e-1,
    ),
}
_OPENVINO_FLOAT32 = OpenVinoBounds(
    cosine=0.999,
    absolute=1e-4,
    relative=1e-3,
)


def openvino_bounds(dtype: str) -> OpenVinoBounds:
    """OpenVINO's bounds on outputs with an rms of 1."""
    return _OPENVINO.get(dtype, _OPENVINO_FLOAT32)


def finite(value: _T) -> _T | None:
    """A value for JSON: None instead of NaN and infinities, anything else as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tolerance(dtype: str) -> float:
    """Allowed error as a share of the rms, from dynamo's benchmarks."""
    return 1e-2 if dtype in HALVES else 1e-4 * EPS[dtype] / EPS["float32"]


def judge_rmse(error: OutputError, error_ratio_max: float) -> tuple[float, float]:
    """Error ratio of an output, and the largest rmse that passes the gate."""
    floor = max(error.native_rmse, EPS[error.dtype] * error.rms)
    ratio = 0.0 if error.rmse == 0 else math.inf
    if floor > 0:
        ratio = error.rmse / floor
    is_wide = error.dtype not in HALVES and error.num_elements >= SMALL_TENSOR
    allowed = (2.0 if is_wide else 3.0) * error.native_rmse
    allowed += tolerance(error.dtype) * error.rms / 10
    return ratio, max(error_ratio_max * floor, allowed)


def eager_tolerance(dtype: str) -> float:
    """Relative error allowed where the reference is eager."""
    return max(EAGER_REFERENCE_TOL, 4 * EPS[dtype])


def golden_problem(error: OutputError, gate: Gate, small: Sums) -> tuple[float, str | None]:
    """The error ratio of an output against a golden output, and why it does not pass the gate; None
    where it passes.

    Where the reference is eager, meeting OpenVINO's bounds is enough.

    Args:
        error: error of the output, pooled where outputs are small.
        gate: the artifact's gate.
        small: sums of the group of small values in this set.
    """
    ratio, bound = judge_rmse(error, gate.error_ratio_max)
    if not gate.float64:
        bound = max(bound, eager_tolerance(error.dtype) * error.rms)
    passes = error.rmse <= bound
    if not gate.float64 and not passes:
        passes = openvino_problem(small, error.dtype, small.rms) is None
    problem = f"rmse {error.rmse:.3g} > {bound:.3g} (error_ratio {ratio:.3g})"
    return ratio, None if passes else problem


def openvino_problem(
    sums: Sums,
    dtype: str,
    rms: float,
) -> str | None:
    """Why an output exceeds the bounds of OpenVINO's output validation against eager; None where it
    does not.

    The absolute bound is in units of the rms; otherwise small outputs might have any size. Where it
    does not hold, `gain` is bounded by it, and by the share of the relative bound that averages of
    so many elements leave.

    Args:
        sums: sums of the output against eager.
        dtype: dtype of the output.
        rms: rms of eager's output, pooled where outputs are small.
    """
    bounds = openvino_bounds(dtype)
    cosine, gain = sums.cosine, sums.gain
    if sums.max_abs_err <= bounds.absolute * rms:
        return None
    gain_bound = bounds.absolute + bounds.relative / math.sqrt(max(sums.num_elements, 1))
    if cosine is None or gain is None or cosine < bounds.cosine:
        exceeded = f"cosine {cosine} < {bounds.cosine}"
    elif sums.max_rel_err > bounds.relative:
        exceeded = (
            f"max_abs_err {sums.max_abs_err:.3g} > {bounds.absolute:g} of the rms"
            f" and max_rel_err {sums.max_rel_err:.3g} > {bounds.relative:g}"
        )
    elif abs(gain - 1) > gain_bound:
        exceeded = f"gain {gain:.4g} differs from 1 by more than {gain_bound:.2g}"
    else:
        return None
    return f"{exceeded} ({dtype}, the reference is eager)"
