"""Compare tensors: equality, errors of an output against its reference, and the gate formula.

The drift gate, the canary, `coldpress diff` and the C++ example all apply `judge_rmse` to the groups of `distances`.
docs/measuring.md explains the figures.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

HALVES = (torch.float16, torch.bfloat16)

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
    if torch.equal(one, other):
        return True
    return comparable(one) and torch.equal(one.isnan(), other.isnan()) and torch.equal(one[~one.isnan()], other[~other.isnan()])


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
        num_wrong = 0 if drawn else sum(int((r[block] != c[block]).sum()) for block in blocks(r.shape))
        return f"{num_wrong} of {r.numel()} elements differ" if num_wrong else None
    if not all(_same_places(in_double(r[block]), in_double(c[block])) for block in blocks(r.shape)):
        return "NaN or Inf at other places"
    return None


def _same_places(r: Tensor, c: Tensor) -> bool:
    if all_finite(r) and all_finite(c):
        return True
    finite = r.isfinite()
    return torch.equal(finite, c.isfinite()) and same_tensors(r[~finite], c[~finite])


def exact_problem(r: Tensor, c: Tensor, limits: Sequence[float] = (), *, drawn: bool = False) -> str | None:
    """Like `structure_problem`, and also a difference of the groups of large values beyond rounding."""
    if (problem := structure_problem(r, c, drawn=drawn)) or not comparable(r):
        return problem
    for sums in distances(r, c, limits=limits)[1:] if limits else ():
        if not sums.rmse <= max(EAGER_REFERENCE_TOL, 4 * torch.finfo(r.dtype).eps) * sums.rms:
            return f"the greatest values, of {sums.rms:.3g}, are off by {sums.rmse:.3g}"
    return None


# Errors


def in_double(tensor: Tensor) -> Tensor:
    """Convert to float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def square_sum(tensor: Tensor) -> float:
    """Sum of squared magnitudes."""
    return float((tensor.abs() if tensor.is_complex() else tensor).square().sum())


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. The least and the greatest decide, which is faster than a mask."""
    if tensor.is_complex() or not tensor.numel():
        return bool(tensor.isfinite().all())
    return all(math.isfinite(bound) for bound in tensor.aminmax())


BLOCK = 32_000
"""Elements compared at a time, so that a comparison needs little memory whatever the size of an output. From 32,768 on, torch
shares an operation among threads, which is slow for such a number; and the sums would depend on the threads."""


def blocks(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Indices of parts of up to BLOCK elements that cover a tensor in order, the last dims whole where they fit."""
    extents: list[int] = []
    room = BLOCK
    for size in reversed(shape):
        extents.insert(0, max(1, min(size, room)))
        room //= max(size, 1)
    starts = (range(0, size, extent) for size, extent in zip(shape, extents, strict=True))
    for place in itertools.product(*starts):
        yield tuple(slice(start, start + extent) for start, extent in zip(place, extents, strict=True))


def _chosen(mask: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elements at a mask of flat tensors. `tensor[mask]` would share few elements among threads."""
    places = mask.nonzero().flatten()
    return [tensor.index_select(0, places) for tensor in tensors]


@dataclass(kw_only=True, slots=True)
class Sums:
    """Sums over elements of an output `c` and its reference `r`, from which all figures follow.

    Attributes:
        noise, signal, power: of |c - r|^2, |r|^2 and |c|^2.
        native: of |e - r|^2 for the eager model's output `e`; 0 without it.
        inner: of the real part of c times the conjugate of r.
        max_abs_err, max_rel_err: maxima; see docs/measuring.md.
    """

    num_elements: int = 0
    noise: float = 0.0
    signal: float = 0.0
    power: float = 0.0
    native: float = 0.0
    inner: float = 0.0
    max_abs_err: float = 0.0
    max_rel_err: float = 0.0

    def add(self, r: Tensor, c: Tensor, e: Tensor | None, eps: float) -> None:
        """Add elements, all finite and in double precision; `eps` of the output's dtype."""
        if not r.numel():
            return
        error = (c - r).abs()
        largest = torch.maximum(c.abs(), r.abs()).clamp_(min=eps)
        self.num_elements += r.numel()
        self.noise += square_sum(error)
        self.signal += square_sum(r)
        self.power += square_sum(c)
        self.native += 0.0 if e is None else square_sum(e - r)
        self.inner += float((c * r.conj()).sum().real)
        self.max_abs_err = max(self.max_abs_err, float(error.max()))
        self.max_rel_err = max(self.max_rel_err, float(error.div_(largest).max()))

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

    def _root_mean(self, squares: float) -> float:
        return math.sqrt(squares / max(self.num_elements, 1))

    def figures(self) -> ErrorFigures:
        """All figures but those of the eager model."""
        return ErrorFigures(
            max_abs_err=self.max_abs_err,
            max_rel_err=self.max_rel_err,
            rmse=self.rmse,
            rms=self.rms,
            sqnr_db=10 * math.log10(self.signal / self.noise) if self.noise > 0 and self.signal > 0 else None,
            cosine=self.inner / math.sqrt(self.signal * self.power) if self.signal > 0 and self.power > 0 else None,
            gain=self.inner / self.signal if self.signal > 0 else None,
        )


def distances(
    r: Tensor, c: Tensor, e: Tensor | None = None, *, limits: Sequence[float] = (), by: Tensor | None = None
) -> list[Sums]:
    """Measure how far an output is from its reference, for each group of elements that are judged apart, each by its own rms.

    Args:
        r: the reference.
        c: the output, of the same shape.
        e: the eager model's output, if that is not the reference.
        limits: of `Magnitudes`, over all input sets.
        by: the tensor whose magnitudes decide the group; default `r`.

    Returns:
        The sums of each group, that of the small values first. A group may be empty. Elements that are not finite in all of the
        tensors belong to no group.
    """
    found = [Sums() for _ in range(len(limits) + 1)]
    eps = torch.finfo(c.dtype if comparable(c) else torch.float64).eps
    for block in blocks(r.shape):
        given = (r if by is None else by, r, c, *(() if e is None else (e,)))
        wide = [in_double(tensor[block]).flatten() for tensor in given]
        if not all(map(all_finite, wide)):
            finite = torch.stack([tensor.isfinite() for tensor in wide]).all(0)
            wide = _chosen(finite, wide)
        sizes = wide[0].abs() if limits else None
        for sums, low, high in zip(found, (0.0, *limits), (*limits, math.inf), strict=True):
            part = wide[1:] if sizes is None else _chosen((low <= sizes) & (sizes < high), wide[1:])
            sums.add(part[0], part[1], part[2] if len(part) > 2 else None, eps)
    return found


def rms_errors(r: Tensor, c: Tensor, limits: Sequence[float] = ()) -> tuple[float, float, float]:
    """Rmse and rms of the group of small values, and the largest absolute error of all, over finite elements."""
    found = distances(r, c, limits=limits)
    return found[0].rmse, found[0].rms, max(sums.max_abs_err for sums in found)


def pooled(expected: Sequence[Tensor], got: Sequence[Tensor], limits: Sequence[float] = ()) -> tuple[float, float]:
    """Rmse and rms of the small values of one output over several input sets; an infinite rmse where a set cannot be compared."""
    sums = Sums()
    for r, c in zip(expected, got, strict=True):
        if exact_problem(r, c, limits) or not comparable(r):
            return math.inf, 0.0
        sums.include(distances(r, c, limits=limits)[0])
    return sums.rmse, sums.rms


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
        for block in blocks(r.shape):
            self._add(r[block], None if e is None else e[block])

    def _add(self, r: Tensor, e: Tensor | None) -> None:
        wide, eager = in_double(r).flatten(), in_double(r if e is None else e).flatten()
        used = wide != 0
        if not all_finite(wide) or not all_finite(eager):
            used &= wide.isfinite() & eager.isfinite()
        if not used.all():
            wide, eager = _chosen(used, (wide, eager))
        error = (eager - wide).abs() ** 2
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
        apart = HALF_SCALES_APART if dtype in HALVES else SCALES_APART
        least = 2 if self._eager else max(2, min(POOL_BELOW, math.ceil(self._total / 10)))
        found: list[float] = []
        num, power, errors = 0.0, 0.0, 0.0
        for binade, (count, squares, wrong) in sorted(self._bins.items()):
            if num >= least and errors <= DIGITS**2 * power and 2.0 ** (binade - 1) >= apart * math.sqrt(power / num):
                found.append(2.0 ** (binade - 1))
            num, power, errors = num + count, power + squares, errors + wrong
        return tuple(found)


# The gate


def judge_rmse(error: OutputError, error_ratio_max: float) -> tuple[float, float]:
    """Error ratio of an output, and the largest rmse that passes the gate."""
    floor = max(error.native_rmse, torch.finfo(error.dtype).eps * error.rms)
    ratio = error.rmse / floor if floor > 0 else (0.0 if error.rmse == 0 else math.inf)
    multiplier = 3.0 if error.dtype in HALVES or error.num_elements < SMALL_TENSOR else 2.0
    return ratio, max(error_ratio_max * floor, multiplier * error.native_rmse + tolerance(error.dtype) * error.rms / 10)


def tolerance(dtype: torch.dtype) -> float:
    """Allowed error as a share of the rms, from dynamo's benchmarks."""
    return 1e-2 if dtype in HALVES else 1e-4 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps


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
        limits: see `distances`.
    """
    ratio, bound = golden_bound(error, gate)
    if error.rmse <= bound:
        return None
    if gate.reference == "eager":
        sums = distances(r, c, limits=limits)[0]
        if openvino_problem(sums.figures(), r.dtype, sums.num_elements) is None:
            return None
    return f"rmse {error.rmse:.3g} > {bound:.3g} (error_ratio {ratio:.3g})"


def openvino_problem(figures: ErrorFigures, dtype: torch.dtype, num_elements: int) -> str | None:
    """Why figures against eager exceed the bounds of OpenVINO's output validation for a dtype; None where they do not.

    The absolute bound is in units of the rms; otherwise small outputs might have any size. Where it does not hold, `gain` is
    bounded by it, and by the share of the relative bound that averages of so many elements leave.
    """
    least_cosine, absolute, relative = _bounds_of(dtype)
    gain_bound = absolute + relative / math.sqrt(max(num_elements, 1))
    if figures.max_abs_err <= absolute * figures.rms:
        return None
    if figures.cosine is None or figures.gain is None or figures.cosine < least_cosine:
        exceeded = f"cosine {figures.cosine} < {least_cosine}"
    elif figures.max_rel_err > relative:
        error = f"max_abs_err {figures.max_abs_err:.3g} > {absolute:g} of the rms"
        exceeded = f"{error} and max_rel_err {figures.max_rel_err:.3g} > {relative:g}"
    elif abs(figures.gain - 1) > gain_bound:
        exceeded = f"gain {figures.gain:.4g} differs from 1 by more than {gain_bound:.2g}"
    else:
        return None
    return f"{exceeded} ({str(dtype).removeprefix('torch.')}, the reference is eager)"


def _bounds_of(dtype: torch.dtype) -> tuple[float, float, float]:
    return _OPENVINO.get(str(dtype).removeprefix("torch."), _OPENVINO["float32"])


def absolute_bound(dtype: torch.dtype) -> float:
    """OpenVINO's bound on the absolute error of outputs with an rms of 1."""
    return _bounds_of(dtype)[1]
