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
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from freezer.compare.gate import tolerance
from freezer.compare.numerics import comparable, in_double

NUM_RUNS = 16
"""Runs of each side: 6e8 ways to split them, many more than are tried."""

NUM_PERMUTATIONS = 99_999

MAX_ELEMENTS = 2**16
"""Elements of an output that are compared in each call, at even distances."""

Run = Sequence[Sequence[Tensor]]
"""Elements of each output in each call of one run."""


def sampled(results: Sequence[Sequence[Tensor]]) -> Run:
    """The elements to compare of each output in each call."""
    return [
        [leaf.flatten()[:: math.ceil(leaf.numel() / MAX_ELEMENTS) or 1].clone() for leaf in leaves]
        for leaves in results
    ]


def distribution_problem(
    names: Sequence[str], eager: Sequence[Run], candidate: Sequence[Run]
) -> str | None:
    """Describe the statistic in which the runs of a candidate differ most from eager's; None if no
    difference is significant.

    Args:
        names: of the outputs.
        eager, candidate: equally many runs of each, with the same calls.
    """
    labels = _labels(len(eager))
    found: list[tuple[float, str]] = []
    highest = torch.full((len(labels) - 1,), -math.inf, dtype=torch.float64)
    for index, name in enumerate(names):
        calls = [
            [run[position][index] for run in (*eager, *candidate)]
            for position in range(len(eager[0]))
        ]
        if any(tensor.numel() != outputs[0].numel() for outputs in calls for tensor in outputs):
            return (
                f"the shape of output {name!r} varies from run to run, so its distribution cannot"
                " be compared"
            )
        for statistic, gram, allowed in _statistics(calls):
            values = ((labels @ gram) * labels).sum(1)
            center, spread = values.mean(), values.std()
            if spread > 0:
                highest = torch.maximum(highest, (values[1:] - center) / spread)
                found.append(
                    (
                        float((values[0] - allowed - center) / spread),
                        f"{statistic} of output {name!r}",
                    )
                )
    distance, what = max(found, default=(-math.inf, ""))
    if distance <= float(highest.max()):
        return None
    rate = 1 / (NUM_PERMUTATIONS + 1)
    return (
        f"the {what} differ from eager's over {len(eager)} runs of each (by chance in {rate:.0e} of"
        " cases)"
    )


@cache
def _labels(num_runs: int) -> Tensor:
    """Weights of the runs in the difference of two means: a row for the true split, eager's first,
    and one for each permutation.
    """
    order = torch.rand(
        NUM_PERMUTATIONS, 2 * num_runs, generator=torch.Generator().manual_seed(0)
    ).argsort(1)
    order = torch.cat([torch.arange(2 * num_runs)[None], order])
    return torch.where(order < num_runs, -1.0, 1.0).double() / num_runs


def _statistics(calls: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Tensor, float]]:
    """Name, Gram matrix of the runs, and allowance of each statistic of one output: T is l' G l for
    labels l.
    """
    means, variances = zip(
        *(_moments(torch.stack(list(outputs))) for outputs in calls), strict=True
    )
    for name, parts in (("means", means), ("variances", variances)):
        yield (
            name,
            torch.stack([gram for gram, _ in parts]).sum(0),
            sum(allowed for _, allowed in parts),
        )
    if not comparable(calls[0][0]):
        pairs = [
            torch.stack([(one == torch.stack(list(outputs))).sum(1) for one in outputs])
            for outputs in calls
        ]
        yield "frequencies", torch.stack(pairs).sum(0).double(), 0.0


def _moments(values: Tensor) -> tuple[tuple[Tensor, float], tuple[Tensor, float]]:
    """Gram matrices of means and of variances, each with its allowance, for the outputs of one call
    as [run, element].

    A mean may be off by rounding, t: the tolerance of the gate, of the element and of the median
    element. The allowance is the sum of t^2 / s^2 over the elements with s > t. The others vary by
    no more than rounding, and the gate judges them.
    """
    wide = in_double(values[:, values.isfinite().all(0)])
    wide = torch.view_as_real(wide).flatten(1) if wide.is_complex() else wide
    center = wide.mean(0)
    share = (
        max(tolerance(values.dtype), 4 * torch.finfo(values.dtype).eps)
        if comparable(values)
        else 0.0
    )
    size = center.abs()
    rounding = share * (size + (size.median() if size.numel() else 0.0))
    deviation = wide - center
    spread = deviation.square().mean(0).sqrt()
    return _gram(deviation, rounding), _gram(
        deviation.square() - spread.square(), 2 * rounding * spread
    )


def _gram(deviation: Tensor, rounding: Tensor) -> tuple[Tensor, float]:
    spread = deviation.square().mean(0).sqrt()
    used = spread > rounding
    scaled = deviation[:, used] / spread[used]
    return scaled @ scaled.T, float((rounding[used] / spread[used]).square().sum())
