"""Compare tensors: equality, errors of an output against its reference, and the gate formula.

The drift gate, the canary, `coldpress diff` and the C++ example all apply `judge_rmse` to the groups of `parts`.
docs/measuring.md explains the figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

POOL_BELOW = 64
"""Outputs with fewer elements are pooled over all input sets: the ratio of two errors of a few elements is chance."""

SMALL_TENSOR = 1000
"""Elements below which dynamo's `same()` applies the larger multiplier."""

SCALES_APART = 500.0
"""Values at least this many times the rms of all smaller ones are judged apart; see `Magnitudes`. The power of two below them
is compared, so values 1,000 times as large always are."""

HALF_SCALES_APART = 50.0
"""The same for half precision, whose tolerance is wider."""

DIGITS = 0.1
"""Relative error of the eager model from which its values have no correct digits: they are zero but for rounding."""

EAGER_REFERENCE_TOL = 1e-3
"""Relative error allowed where the reference is eager: OpenVINO's bound for float32. Lower precisions use their eps."""

_HALVES = (torch.float16, torch.bfloat16)

_OPENVINO: Mapping[str, tuple[float, float, float]] = {
    "float32": (0.999, 1e-4, 1e-3),
    "float16": (0.995, 1e-2, 5e-2),
    "bfloat16": (0.99, 2e-2, 1e-1),
}
"""OpenVINO's bounds by dtype: least cosine, and the absolute and relative error of which one must hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputError:
    """Error of one output, as the gate judges it.

    Attributes:
        rmse: root-mean-square distance from the reference.
        native_rmse: the same for the eager model.
        rms: root mean square of the reference.
        dtype: of the output.
        num_elements: of the output in one input set.
    """

    rmse: float
    native_rmse: float
    rms: float
    dtype: torch.dtype
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenGate:
    """Gate recorded in a manifest, for comparisons with golden outputs.

    Attributes:
        reference: source of the golden outputs; `eager` widens the bounds.
    """

    error_ratio_max: float
    reference: Literal["float64", "eager"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFigures:
    """Figures of docs/measuring.md for one output; None where the figure is undefined."""

    max_abs_err: float
    max_rel_err: float
    rmse: float
    rms: float
    sqnr_db: float | None
    cosine: float | None
    gain: float | None


# Equality


def comparable(tensor: Tensor) -> bool:
    """Whether the dtype has rounding errors; integers and bools must be equal."""
    return tensor.is_floating_point() or tensor.is_complex()


def same_tensors(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal shapes, dtypes, layouts and elements; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if not comparable(one):
        return torch.equal(one, other)
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one[~one.isnan()], other[~other.isnan()])


def structure_problem(r: Tensor, c: Tensor, *, drawn: bool = False) -> str | None:
    """First difference in shape, dtype, integer or bool elements, or the places of NaN and Inf; None if there is none.

    Args:
        r, c: tensors to compare.
        drawn: integers and bools are random, so they may differ.
    """
    if c.shape != r.shape:
        return f"got shape {list(c.shape)}, expected {list(r.shape)}"
    if c.dtype != r.dtype:
        return f"got dtype {c.dtype}, expected {r.dtype}"
    if not comparable(r):
        num_wrong = 0 if drawn else int((r != c).sum())
        return f"{num_wrong} of {r.numel()} elements differ" if num_wrong else None
    finite = r.isfinite()
    if not torch.equal(finite, c.isfinite()) or not same_tensors(r[~finite], c[~finite]):
        return "NaN or Inf at other places"
    return None


def exact_problem(r: Tensor, c: Tensor, limits: Sequence[float] = (), *, drawn: bool = False) -> str | None:
    """Like `structure_problem`, and also a difference of the groups of large values beyond rounding."""
    if (problem := structure_problem(r, c, drawn=drawn)) or not comparable(r):
        return problem
    for one, other in parts(r, c, limits=limits)[1:]:
        error, size = rms(other - one), rms(one)
        if not error <= max(EAGER_REFERENCE_TOL, 4 * torch.finfo(r.dtype).eps) * size:
            return f"the greatest values, of {size:.3g}, are off by {error:.3g}"
    return None


# Errors


def in_double(tensor: Tensor) -> Tensor:
    """Convert to float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def square_sum(tensor: Tensor) -> float:
    """Sum of squared magnitudes."""
    return float((tensor.abs() ** 2).sum())


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 for an empty tensor."""
    return math.sqrt(square_sum(tensor) / max(tensor.numel(), 1))


def finite_difference(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes of the difference and elements of `other`, flat, in double precision, where the difference is finite."""
    wide = in_double(other)
    difference = (in_double(one) - wide).abs()
    finite = difference.isfinite()
    return difference[finite], wide[finite]


def rms_errors(r: Tensor, c: Tensor, limits: Sequence[float] = ()) -> tuple[float, float, float]:
    """Rmse and rms of the group of small values, and the largest absolute error of all, over finite elements."""
    found = parts(r, c, limits=limits)
    r64, c64 = found[0]
    worst = max((float((other - one).abs().max()) for one, other in found if one.numel()), default=0.0)
    return rms(c64 - r64), rms(r64), worst


def pooled(expected: Sequence[Tensor], got: Sequence[Tensor], limits: Sequence[float] = ()) -> tuple[float, float]:
    """Rmse and rms of one output over several input sets; an infinite rmse where a set cannot be compared."""
    if any(exact_problem(r, c, limits) or not comparable(r) for r, c in zip(expected, got, strict=True)):
        return math.inf, 0.0
    rmse, size, _ = rms_errors(torch.cat([r.flatten() for r in expected]), torch.cat([c.flatten() for c in got]), limits)
    return rmse, size


def error_figures(r: Tensor, c: Tensor, *, eps: float) -> ErrorFigures:
    """Figures for a reference `r` and an output `c`, both flat, finite and in double precision; `eps` of the output's dtype."""
    count = max(r.numel(), 1)
    error = (c - r).abs()
    signal, noise, power = square_sum(r), square_sum(c - r), square_sum(c)
    inner = float((c * r.conj()).sum().real)
    largest = torch.maximum(torch.maximum(c.abs(), r.abs()), torch.full_like(error, eps))
    return ErrorFigures(
        max_abs_err=float(error.max()) if r.numel() else 0.0,
        max_rel_err=float((error / largest).max()) if r.numel() else 0.0,
        rmse=math.sqrt(noise / count),
        rms=math.sqrt(signal / count),
        sqnr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
        cosine=inner / math.sqrt(signal * power) if signal > 0 and power > 0 else None,
        gain=inner / signal if signal > 0 else None,
    )


# Groups of elements


class Magnitudes:
    """Histogram of the magnitudes of one output over its input sets, by powers of two, which decides the groups to judge apart.

    An output may mix scales, for example a mask's -1e9 among logits of 10. The rms of the whole output is then the rms of the large
    values, and hides errors of the others.
    """

    def __init__(self) -> None:
        self._bins: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """Count, sum of squares, and sum of the eager model's squared errors, by b: 2 ** (b - 1) <= size < 2 ** b."""
        self._total = 0
        self._eager = False

    def add(self, r: Tensor, e: Tensor | None = None) -> None:
        """Count the finite elements of a reference that are not 0, with the errors of eager unless it is the reference."""
        self._eager = e is not None
        finite = r.isfinite() & (r != 0) & (True if e is None else e.isfinite())
        wide = in_double(r[finite])
        error = torch.zeros_like(wide).real if e is None else (in_double(e[finite]) - wide).abs() ** 2
        sizes = wide.abs()
        self._total += sizes.numel()
        binades = torch.frexp(sizes).exponent.long()
        lowest = int(binades.min()) if binades.numel() else 0
        sums = [torch.bincount(binades - lowest, weights=weight) for weight in (torch.ones_like(sizes), sizes**2, error)]
        for place, row in enumerate(torch.stack(sums, 1).tolist()):
            if row[0]:
                self._bins[place + lowest] = [one + other for one, other in zip(self._bins[place + lowest], row, strict=True)]

    def limits(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Magnitudes from which values of an output of a dtype are judged apart from all smaller ones, ascending.

        The smaller values must be at least two, and the eager model must have correct digits there: values that are zero but for
        rounding do not form a group. Where eager is the reference, they must be at least 64 or a tenth of all instead.
        """
        apart = HALF_SCALES_APART if dtype in _HALVES else SCALES_APART
        least = 2 if self._eager else max(2, min(POOL_BELOW, math.ceil(self._total / 10)))
        found: list[float] = []
        num, power, errors = 0.0, 0.0, 0.0
        for binade, (count, squares, wrong) in sorted(self._bins.items()):
            if num >= least and errors <= DIGITS**2 * power and 2.0 ** (binade - 1) >= apart * math.sqrt(power / num):
                found.append(2.0 ** (binade - 1))
            num, power, errors = num + count, power + squares, errors + wrong
        return tuple(found)


def parts(r: Tensor, *others: Tensor, limits: Sequence[float] = ()) -> list[tuple[Tensor, ...]]:
    """The groups of elements of an output that are judged apart, each by its own rms.

    Args:
        r: the reference.
        others: outputs of the same shape.
        limits: of `Magnitudes`, over all input sets.

    Returns:
        For each group the elements of `r` and of `others`, flat and in double precision, the group of small values first. A group
        may be empty. Elements that are not finite in all of them belong to no group.
    """
    finite = torch.stack([tensor.isfinite() for tensor in (r, *others)]).all(0)
    wide = [in_double(tensor)[finite] for tensor in (r, *others)]
    if not limits:
        return [tuple(wide)]
    group = torch.bucketize(wide[0].abs(), torch.tensor(limits, dtype=torch.float64), right=True)
    return [tuple(tensor[group == index] for tensor in wide) for index in range(len(limits) + 1)]


# The gate


def judge_rmse(error: OutputError, error_ratio_max: float) -> tuple[float, float]:
    """Error ratio of an output, and the largest rmse that passes the gate."""
    floor = max(error.native_rmse, torch.finfo(error.dtype).eps * error.rms)
    ratio = error.rmse / floor if floor > 0 else (0.0 if error.rmse == 0 else math.inf)
    multiplier = 3.0 if error.dtype in _HALVES or error.num_elements < SMALL_TENSOR else 2.0
    return ratio, max(error_ratio_max * floor, multiplier * error.native_rmse + tolerance(error.dtype) * error.rms / 10)


def tolerance(dtype: torch.dtype) -> float:
    """Allowed error as a share of the rms, from dynamo's benchmarks."""
    return 1e-2 if dtype in _HALVES else 1e-4 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


def golden_bound(error: OutputError, gate: GoldenGate) -> tuple[float, float]:
    """Error ratio against a golden output, and the largest rmse that the artifact's gate allows."""
    ratio, bound = judge_rmse(error, gate.error_ratio_max)
    if gate.reference == "eager":
        bound = max(bound, EAGER_REFERENCE_TOL * error.rms, 4 * torch.finfo(error.dtype).eps * error.rms)
    return ratio, bound


def golden_problem(r: Tensor, c: Tensor, error: OutputError, gate: GoldenGate, limits: Sequence[float] = ()) -> str | None:
    """Why an output does not pass the gate against a golden output; None where it passes.

    Where the reference is eager, meeting OpenVINO's bounds is enough.

    Args:
        r, c: golden output and output, without an `exact_problem`.
        error: of `c` against `r`, pooled where they are small.
        limits: see `parts`.
    """
    ratio, bound = golden_bound(error, gate)
    if error.rmse <= bound:
        return None
    if gate.reference == "eager":
        figures = error_figures(*parts(r, c, limits=limits)[0], eps=torch.finfo(r.dtype).eps)
        if openvino_problem(figures, r.dtype) is None:
            return None
    return f"rmse {error.rmse:.3g} > {bound:.3g} (error_ratio {ratio:.3g})"


def openvino_problem(figures: ErrorFigures, dtype: torch.dtype) -> str | None:
    """Why figures exceed the bounds of OpenVINO's output validation for a dtype; None where they do not."""
    name = str(dtype).removeprefix("torch.")
    least_cosine, absolute, relative = _OPENVINO.get(name, _OPENVINO["float32"])
    if figures.max_abs_err == 0:
        return None
    if figures.cosine is None or figures.cosine < least_cosine:
        return f"cosine {figures.cosine} < {least_cosine} ({name}, the reference is eager)"
    if figures.max_abs_err > absolute and figures.max_rel_err > relative:
        exceeded = f"max_abs_err {figures.max_abs_err:.3g} > {absolute:g} and max_rel_err {figures.max_rel_err:.3g} > {relative:g}"
        return f"{exceeded} ({name}, the reference is eager)"
    return None
