"""Compare tensors: equality, and errors of an output against its reference, to which gate.py
applies its formula.

array_numerics.py has what the canary needs of this for numpy arrays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from freezer.compare.gate import DIGITS, EAGER_REFERENCE_TOL, POOL_BELOW, Sums, blocks

SCALES_APART = 500.0
"""Values at least this many times the rms of all smaller ones are judged apart; see `Magnitudes`.
The power of two below them is compared, so values 1,000 times as large always are."""

HALF_SCALES_APART = 50.0
"""The same for half precision, whose tolerance is wider."""

HALVES = (torch.float16, torch.bfloat16)

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
    return (
        comparable(one)
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one[~one.isnan()], other[~other.isnan()])
    )


def structure_problem(r: Tensor, c: Tensor, *, drawn: bool = False) -> str | None:
    """First difference in shape, dtype, integer or bool elements, or the places of NaN and Inf;
    None if there is none.

    Args:
        r, c: tensors to compare.
        drawn: integers and bools are random, so they may differ.
    """
    if c.shape != r.shape:
        return f"got shape {list(c.shape)}, expected {list(r.shape)}"
    if c.dtype != r.dtype:
        return f"got dtype {c.dtype}, expected {r.dtype}"
    if not comparable(r):
        num_wrong = (
            0 if drawn else sum(int((r[block] != c[block]).sum()) for block in blocks(r.shape))
        )
        return f"{num_wrong} of {r.numel()} elements differ" if num_wrong else None
    if not all(_same_places(in_double(r[block]), in_double(c[block])) for block in blocks(r.shape)):
        return "NaN or Inf at other places"
    return None


def _same_places(r: Tensor, c: Tensor) -> bool:
    if all_finite(r) and all_finite(c):
        return True
    finite = r.isfinite()
    return torch.equal(finite, c.isfinite()) and same_tensors(r[~finite], c[~finite])


def exact_problem(
    r: Tensor, c: Tensor, limits: Sequence[float] = (), *, drawn: bool = False
) -> str | None:
    """Like `structure_problem`, and also a difference of the groups of large values beyond
    rounding.
    """
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


def doubles(tensor: Tensor) -> NDArray[Any]:
    """The same as a numpy array, from a tensor on the CPU."""
    array: NDArray[Any] = in_double(tensor.detach()).resolve_conj().resolve_neg().numpy()
    return array


def square_sum(tensor: Tensor) -> float:
    """Sum of squared magnitudes."""
    return float((tensor.abs() if tensor.is_complex() else tensor).square().sum())


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    The least and the greatest decide, which is faster than a mask.
    """
    if tensor.is_complex() or not tensor.numel():
        return bool(tensor.isfinite().all())
    return all(math.isfinite(bound) for bound in tensor.aminmax())


def _chosen(mask: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elements at a mask of flat tensors.

    `tensor[mask]` would share few elements among threads.
    """
    places = mask.nonzero().flatten()
    return [tensor.index_select(0, places) for tensor in tensors]


def _add(sums: Sums, r: Tensor, c: Tensor, e: Tensor | None, eps: float) -> None:
    """Add elements, all finite and in double precision; `eps` of the output's dtype."""
    if not r.numel():
        return
    error = (c - r).abs()
    largest = torch.maximum(c.abs(), r.abs()).clamp_(min=eps)
    sums.num_elements += r.numel()
    sums.noise += square_sum(error)
    sums.signal += square_sum(r)
    sums.power += square_sum(c)
    sums.native += 0.0 if e is None else square_sum(e - r)
    sums.inner += float((c * r.conj()).sum().real)
    sums.max_abs_err = max(sums.max_abs_err, float(error.max()))
    sums.max_rel_err = max(sums.max_rel_err, float(error.div_(largest).max()))


def distances(
    r: Tensor,
    c: Tensor,
    e: Tensor | None = None,
    *,
    limits: Sequence[float] = (),
    by: Tensor | None = None,
) -> list[Sums]:
    """Measure how far an output is from its reference, for each group of elements that are judged
    apart, each by its own rms.

    Args:
        r: the reference.
        c: the output, of the same shape.
        e: the eager model's output, if that is not the reference.
        limits: of `Magnitudes`, over all input sets.
        by: the tensor whose magnitudes decide the group; default `r`.

    Returns:
        The sums of each group, that of the small values first. A group may be empty. Elements that
        are not finite in all of the tensors belong to no group.
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
            _add(sums, part[0], part[1], part[2] if len(part) > 2 else None, eps)
    return found


def rms_errors(r: Tensor, c: Tensor, limits: Sequence[float] = ()) -> tuple[float, float, float]:
    """Rmse and rms of the group of small values, and the largest absolute error of all, over finite
    elements.
    """
    found = distances(r, c, limits=limits)
    return found[0].rmse, found[0].rms, max(sums.max_abs_err for sums in found)


def pooled(
    expected: Sequence[Tensor], got: Sequence[Tensor], limits: Sequence[float] = ()
) -> tuple[float, float]:
    """Rmse and rms of the small values of one output over several input sets; an infinite rmse
    where a set cannot be compared.
    """
    sums = Sums()
    for r, c in zip(expected, got, strict=True):
        if exact_problem(r, c, limits) or not comparable(r):
            return math.inf, 0.0
        sums.include(distances(r, c, limits=limits)[0])
    return sums.rmse, sums.rms


# Groups of elements


class Magnitudes:
    """Histogram of the magnitudes of one output over its input sets, by powers of two, which
    decides the groups to judge apart.

    An output may mix scales, for example a mask's -1e9 among logits of 10. The rms of the whole
    output is then the rms of the large values, and hides errors of the others.
    """

    def __init__(self) -> None:
        self._bins: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """Count, sum of squares, and sum of the eager model's squared errors, by b: 2 ** (b - 1) <=
        size < 2 ** b.
        """
        self._total = 0
        self._eager = False

    def add(self, r: Tensor, e: Tensor | None = None) -> None:
        """Count the finite elements of a reference that are not 0, with the errors of eager unless
        it is the reference.
        """
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
        sums = [
            torch.bincount(binades - lowest, weights=weight)
            for weight in (torch.ones_like(sizes), sizes**2, error)
        ]
        for place, row in enumerate(torch.stack(sums, 1).tolist()):
            if row[0]:
                self._bins[place + lowest] = [
                    one + other for one, other in zip(self._bins[place + lowest], row, strict=True)
                ]

    def limits(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Magnitudes from which values of an output of a dtype are judged apart from all smaller
        ones, ascending.

        The smaller values must be at least two, and the eager model must have correct digits there:
        values that are zero but for rounding do not form a group. Where eager is the reference,
        they must be at least 64 or a tenth of all instead.
        """
        apart = HALF_SCALES_APART if dtype in HALVES else SCALES_APART
        least = 2 if self._eager else max(2, min(POOL_BELOW, math.ceil(self._total / 10)))
        found: list[float] = []
        num, power, errors = 0.0, 0.0, 0.0
        for binade, (count, squares, wrong) in sorted(self._bins.items()):
            if (
                num >= least
                and errors <= DIGITS**2 * power
                and 2.0 ** (binade - 1) >= apart * math.sqrt(power / num)
            ):
                found.append(2.0 ** (binade - 1))
            num, power, errors = num + count, power + squares, errors + wrong
        return tuple(found)
