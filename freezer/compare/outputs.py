"""Compare an output with its reference: structure, and the sums from which all figures follow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from freezer.codec import frozen
from freezer.compare.gate import EPS, Sums, eager_tolerance

Numbers: TypeAlias = NDArray[Any]

BLOCK = 32_000
"""Elements compared at a time, so that a comparison needs little memory for outputs of any size."""

Block = tuple[slice, ...]


@frozen
class Values:
    """The values of one output.

    Attributes:
        array: the values; a dtype that numpy lacks is widened.
        dtype: torch's name of the output's dtype.
    """

    array: Numbers
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return self.array.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.array.size

    @property
    def rounds(self) -> bool:
        """Whether the dtype has rounding errors; integers and bools must be equal."""
        return self.array.dtype.kind in "fc"

    def wide(self, block: Block) -> Numbers:
        """A block in float64 or complex128."""
        dtype = np.result_type(self.array.dtype, np.float64)
        return np.asarray(self.array[block], dtype)

    def blocks(self) -> Iterator[Block]:
        """Indices of parts of up to BLOCK elements that cover the array in order, the last dims
        whole where they fit.
        """
        extents: list[int] = []
        room = BLOCK
        for size in reversed(self.shape):
            extents.insert(0, max(1, min(size, room)))
            room //= max(size, 1)
        axes = []
        for size, extent in zip(self.shape, extents, strict=True):
            axes.append([slice(start, start + extent) for start in range(0, size, extent)])
        yield from product(*axes)


@frozen
class Comparison:
    """An output beside its golden output.

    Attributes:
        problem: first difference that rounding does not explain; None without one.
        groups: sums of each group of elements, as `distances` returns them; none with a problem,
            and none for integers and bools.
    """

    problem: str | None
    groups: Sequence[Sums] = ()

    @property
    def max_abs_err(self) -> float:
        """Largest absolute error of all groups."""
        return max((sums.max_abs_err for sums in self.groups), default=0.0)


def pooled(comparisons: Iterable[Comparison]) -> Sums:
    """Sums of the small values of one output over several input sets; of an infinite error where a
    set cannot be compared.
    """
    total = Sums()
    for comparison in comparisons:
        if not comparison.groups:
            return Sums(noise=math.inf)
        total.include(comparison.groups[0])
    return total


def compare(
    r: Values,
    c: Values,
    limits: Sequence[float] = (),
    *,
    drawn: bool = False,
) -> Comparison:
    """Compare an output with its golden output.

    The groups of large values must be equal but for rounding; the gate judges the first group.

    Args:
        r, c: the golden output, and the output.
        limits: limits of the groups, from `Magnitudes`.
        drawn: whether integers and bools are random, so that they may differ.
    """
    problem = structure_problem(r, c, drawn=drawn)
    if problem or not r.rounds:
        return Comparison(problem=problem)
    groups = distances(r, c, limits=limits)
    for sums in groups[1:]:
        if not sums.rmse <= eager_tolerance(r.dtype) * sums.rms:
            problem = f"the greatest values, of {sums.rms:.3g}, are off by {sums.rmse:.3g}"
            return Comparison(problem=problem)
    return Comparison(
        problem=None,
        groups=groups,
    )


def structure_problem(
    r: Values,
    c: Values,
    *,
    drawn: bool = False,
) -> str | None:
    """First difference in shape, dtype, integer or bool elements, or the positions of NaN and Inf;
    None without one.

    Args:
        r, c: the outputs to compare.
        drawn: whether integers and bools are random, so that they may differ.
    """
    if c.shape != r.shape:
        return f"got shape {list(c.shape)}, expected {list(r.shape)}"
    if c.dtype != r.dtype:
        return f"got dtype {c.dtype}, expected {r.dtype}"
    if not r.rounds:
        num_wrong = 0 if drawn else int(np.count_nonzero(r.array != c.array))
        return f"{num_wrong} of {r.size} elements differ" if num_wrong else None
    for block in r.blocks():
        odd, other = (
            np.where(np.isfinite(array), 0, array) for array in (r.array[block], c.array[block])
        )
        if not np.array_equal(odd, other, equal_nan=True):
            return "NaN or Inf at other places"
    return None


def distances(
    r: Values,
    c: Values,
    e: Values | None = None,
    *,
    limits: Sequence[float] = (),
    by: Values | None = None,
) -> list[Sums]:
    """Measure how far an output is from its reference, for each group of elements that are judged
    apart, each by its own rms.

    Args:
        r: the reference.
        c: the output, of the same shape.
        e: the eager model's output, if that is not the reference.
        limits: limits of `Magnitudes`, over all input sets.
        by: the output whose magnitudes decide the group; default `r`.

    Returns:
        The sums of each group, that of the small values first. A group may be empty. Elements that
        are not finite in all of the outputs belong to no group.
    """
    groups = [Sums() for _ in range(len(limits) + 1)]
    outputs = [by or r, r, c, *filter(None, [e])]
    eps = EPS[c.dtype if c.rounds else "float64"]
    for block in r.blocks():
        parts = [values.wide(block).ravel() for values in outputs]
        used = np.all(list(map(np.isfinite, parts)), axis=0)
        sizes, *parts = [part[used] for part in parts]
        group_of = np.searchsorted(limits, abs(sizes), side="right")
        for index, sums in enumerate(groups):
            chosen = group_of == index
            if chosen.any():
                sums.include(_sums([part[chosen] for part in parts], eps))
    return groups


def _sums(parts: Sequence[Numbers], eps: float) -> Sums:
    """Sums of elements of the reference, the output and, if given, eager.

    Args:
        parts: equally many values of each, all finite and in double precision.
        eps: eps of the output's dtype.
    """
    r, c = parts[:2]
    with np.errstate(all="ignore"):
        error = abs(c - r)
        sizes, output_sizes = abs(r), abs(c)
        relative = error / np.maximum(np.maximum(sizes, output_sizes), eps)
        return Sums(
            num_elements=r.size,
            noise=_total(error**2),
            signal=_total(sizes**2),
            power=_total(output_sizes**2),
            native=sum(_total(abs(e - r) ** 2) for e in parts[2:]),
            inner=_total((c * r.conj()).real),
            max_abs_err=float(error.max()),
            max_rel_err=float(relative.max()),
        )


def _total(values: Numbers) -> float:
    """Sum up to BLOCK values in the order of torch's `sum`, which gives the same bits.

    It sums 16 lanes in a cascade of steps of 16 rows, then four vectors of four lanes, then the
    lanes.
    """
    rows, rest = _rows(values, 16)
    total = np.zeros(16)
    while len(rows):
        steps, further = _rows(rows, 16)
        total = total + further.sum(0)
        rows = steps.sum(1)
    vectors, rest = _rows(rest, 4)
    first, *others = total.reshape(4, 4)
    lanes = np.vstack([first, *vectors, *others]).sum(0)
    return float(np.concatenate([rest, lanes]).sum())


def _rows(values: Numbers, size: int) -> tuple[Numbers, Numbers]:
    """Rows of so many values, and the rest."""
    num_rows = len(values) // size
    whole, rest = np.split(values, [num_rows * size])
    return whole.reshape(num_rows, size, *values.shape[1:]), rest
