"""Compare the distributions of random outputs: means, variances and frequencies over repeated runs
of eager and a candidate.

The error of a random output is compared with the noise of eager, which also covers other means. So
both are run NUM_RUNS times, and a permutation test compares the runs. For each output it takes
these statistics, where each element i counts in units of its standard deviation s_i over all runs
of both:

- means: T = sum over i of (mean_c,i - mean_e,i)^2 / s_i^2;
- variances: the same for the squared deviations from the mean of all runs;
- frequencies, for integers and bools: sum over i and values v of (share_c,i(v) - share_e,i(v))^2.

If both have the same distribution, a random exchange of runs between them leaves the distribution
of T unchanged, for any distribution and any dependence between elements. The candidate is rejected
if, for any output and statistic, T (less the allowed rounding, see `_moments`) exceeds all
NUM_PERMUTATIONS exchanges, each statistic in units of its standard deviation over them. So a right
candidate is rejected with a probability of at most 1 / (NUM_PERMUTATIONS + 1) = 1e-5.

Sources: Phipson and Smyth, "Permutation P-values should never be zero" (2010), for the rate;
Westfall and Young, "Resampling-Based Multiple Testing" (1993), maxT, for several statistics with
one rate.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from freezer.compare import tolerance
from freezer.compare.tensor_values import comparable, in_double

NUM_RUNS = 16
"""Runs of each side: 6e8 ways to split them, many more than are tried."""

NUM_PERMUTATIONS = 99_999

MAX_ELEMENTS = 2**16
"""Elements of an output that are compared in each call, at even distances."""

Run = Sequence[Sequence[Tensor]]
"""Elements of each output in each call of one run."""

_Gram = tuple[Tensor, float]
"""Gram matrix of the runs, and the allowance for rounding."""


def sampled(results: Sequence[Sequence[Tensor]]) -> Run:
    """The elements to compare of each output in each call."""
    return [list(map(_elements, leaves)) for leaves in results]


def _elements(leaf: Tensor) -> Tensor:
    step = math.ceil(leaf.numel() / MAX_ELEMENTS) or 1
    return leaf.flatten()[::step].clone()


def distribution_problem(
    names: Sequence[str],
    eager: Sequence[Run],
    candidate: Sequence[Run],
) -> str | None:
    """Describe the statistic in which the runs of a candidate differ most from eager's; None if no
    difference is significant.

    Args:
        names: names of the outputs.
        eager, candidate: equally many runs of each, with the same calls.
    """
    labels = _labels(len(eager))
    largest, label = -math.inf, ""
    highest = labels.new_full((NUM_PERMUTATIONS,), -math.inf)
    for index, name in enumerate(names):
        calls = _answers((*eager, *candidate), index)
        if any(map(_sizes_vary, calls)):
            return f"the shape of output {name!r} varies, so its distribution cannot be compared"
        for statistic, gram, allowed in _statistics(calls):
            products = (labels @ gram) * labels
            values = products.sum(1)
            center = values.mean()
            spread = values.std()
            if spread > 0:
                permuted = (values[1:] - center) / spread
                highest = torch.maximum(highest, permuted)
                difference = values[0] - allowed - center
                distance = difference / spread
                if distance > largest:
                    largest = float(distance)
                    label = f"{statistic} of output {name!r}"
    if largest <= float(highest.max()):
        return None
    rate = 1 / (NUM_PERMUTATIONS + 1)
    return (
        f"the {label} differ from eager's over {len(eager)} runs of each (by chance in {rate:.0e}"
        " of cases)"
    )


def _answers(
    runs: Sequence[Run],
    index: int,
) -> list[list[Tensor]]:
    """One output of each call, by every run."""
    of_output = operator.itemgetter(index)
    return [list(map(of_output, call)) for call in zip(*runs, strict=True)]


def _sizes_vary(outputs: Sequence[Tensor]) -> bool:
    return len({output.numel() for output in outputs}) > 1


@cache
def _labels(num_runs: int) -> Tensor:
    """Weights of the runs in the difference of two means: a row for the true split, eager's first,
    and one for each permutation.
    """
    generator = torch.Generator().manual_seed(0)
    size = (NUM_PERMUTATIONS, 2 * num_runs)
    keys = torch.rand(size, generator=generator)
    permutations = keys.argsort(1)
    identity = torch.arange(2 * num_runs)
    order = torch.cat([identity[None], permutations])
    signs = torch.where(
        order < num_runs,
        -1.0,
        1.0,
    )
    return signs.double() / num_runs


def _statistics(calls: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Tensor, float]]:
    """The statistics of one output, from the elements of each run in each call: the name, the Gram
    matrix G of the runs, and the allowance for rounding. T is l' G l for labels l.
    """
    means = []
    variances = []
    frequencies = []
    for outputs in calls:
        values = torch.stack(list(outputs))
        mean, variance = _moments(values)
        means.append(mean)
        variances.append(variance)
        if not comparable(values):
            equal = _num_equal(values)
            frequencies.append((equal.double(), 0.0))
    yield "means", *_summed(means)
    yield "variances", *_summed(variances)
    if frequencies:
        yield "frequencies", *_summed(frequencies)


def _summed(grams: Sequence[_Gram]) -> _Gram:
    stacked = torch.stack([matrix for matrix, _ in grams])
    return stacked.sum(0), sum(allowed for _, allowed in grams)


def _num_equal(values: Tensor) -> Tensor:
    """Number of equal elements of every two runs."""
    return torch.stack([(run == values).sum(1) for run in values])


def _moments(values: Tensor) -> tuple[_Gram, _Gram]:
    """Gram matrices of means and of variances, each with its allowance, for the outputs of one call
    as [run, element].

    A mean may be off by rounding, t: the tolerance of the gate, of the element and of the median
    element. The allowance is the sum of t^2 / s^2 over the elements with s > t. The others vary by
    no more than rounding, and the gate judges them.
    """
    used = values.isfinite().all(0)
    finite = values[:, used]
    wide = in_double(finite)
    if wide.is_complex():
        wide = torch.view_as_real(wide).flatten(1)
    center = wide.mean(0)
    share = 0.0
    if comparable(values):
        dtype = str(values.dtype).removeprefix("torch.")
        share = max(
            tolerance(dtype),
            4 * torch.finfo(values.dtype).eps,
        )
    size = center.abs()
    typical = size.median() if size.numel() else 0.0
    rounding = share * (size + typical)
    deviation = wide - center
    squares = deviation.square()
    variance = squares.mean(0)
    spread = variance.sqrt()
    means = _gram(deviation, rounding)
    variances = _gram(
        squares - spread.square(),
        2 * rounding * spread,
    )
    return means, variances


def _gram(
    deviation: Tensor,
    rounding: Tensor,
) -> _Gram:
    variance = deviation.square().mean(0)
    spread = variance.sqrt()
    used = spread > rounding
    spread = spread[used]
    scaled = deviation[:, used] / spread
    shares = rounding[used] / spread
    allowed = shares.square().sum()
    return scaled @ scaled.T, float(allowed)
