"""Compare the distributions of random outputs over repeated runs of eager and a candidate.

The error of a random output is compared with the noise of eager, which also covers other means. So
both are run NUM_RUNS times, and a permutation test compares the runs. For each output it takes
these statistics, where each element i counts in units of its standard deviation s_i over all runs
of both:

- means: T = sum over i of (mean_c,i - mean_e,i)^2 / s_i^2;
- variances: the same for the squared deviations from the mean of all runs;
- products of rows: sum over i of the squared difference of the mean products of element i and the
  same element of the next row, so that one draw for several rows shows;
- products of elements: the same for all pairs of elements, which is the square of the Gram matrix
  of the means;
- distributions: sum over i of the energy distance of the two samples of element i;
- frequencies, for integers and bools: sum over i and values v of (share_c,i(v) - share_e,i(v))^2.

If both have the same distribution, a random exchange of runs between them leaves the distribution
of T unchanged, for any distribution and any dependence between elements. The candidate is rejected
if, for any output and statistic, T (less the allowed rounding, see `_grams`) exceeds all
NUM_PERMUTATIONS exchanges, each statistic in units of its standard deviation over them. So a right
candidate is rejected with a probability of at most 1 / (NUM_PERMUTATIONS + 1) = 1e-5.

Sources: Phipson and Smyth, "Permutation P-values should never be zero" (2010), for the rate;
Westfall and Young, "Resampling-Based Multiple Testing" (1993), maxT, for several statistics with
one rate; Szekely and Rizzo, "Energy statistics" (2013), for the energy distance.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from freezer.compare import tolerance
from freezer.freezing.models import Outputs
from freezer.runtime.input_sets import Draws
from freezer.runtime.tensors import comparable, dtype_name, in_double

NUM_RUNS = 16
"""Runs of each side: 6e8 ways to split them, many more than are tried."""

NUM_PERMUTATIONS = 99_999

MAX_ELEMENTS = 2**16
"""Elements of an output that are compared in each call: those at up to half as many random places,
then for each the same element of the next row.
"""

Run = Sequence[Sequence[Tensor]]
"""Elements of each output in each call of one run."""

_Gram = tuple[Tensor, float]
"""Gram matrix of the runs, and the allowance for rounding."""


def sampled(results: Outputs) -> Run:
    """The elements to compare of each output in each call."""
    return [list(map(_elements, leaves)) for leaves in results]


def _elements(leaf: Tensor) -> Tensor:
    num = leaf.numel()
    places = torch.arange(num)
    if num > MAX_ELEMENTS // 2:
        places = Draws(num).integers(0, num, (MAX_ELEMENTS // 2,))
    num_rows = next((size for size in leaf.shape if size > 1), 1)
    in_next_row = (places + num // num_rows) % num
    return leaf.flatten()[torch.cat([places, in_next_row])]


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
        of_output = operator.itemgetter(index)
        calls = [list(map(of_output, call)) for call in zip(*eager, *candidate, strict=True)]
        if any(map(_sizes_vary, calls)):
            return f"the shape of output {name!r} varies, so its distribution cannot be compared"
        for statistic, gram, allowed in _statistics(calls):
            values = ((labels @ gram) * labels).sum(1)
            center, spread = values.mean(), values.std()
            if spread > 0:
                highest = torch.maximum(highest, (values[1:] - center) / spread)
                distance = float((values[0] - allowed - center) / spread)
                if distance > largest:
                    largest, label = distance, f"{statistic} of output {name!r}"
    if largest <= float(highest.max()):
        return None
    return (
        f"the {label} differ from eager's over {len(eager)} runs of each (by chance in"
        f" {1 / (NUM_PERMUTATIONS + 1):.0e} of cases)"
    )


def _sizes_vary(outputs: Sequence[Tensor]) -> bool:
    return len({output.numel() for output in outputs}) > 1


@cache
def _labels(num_runs: int) -> Tensor:
    """Weights of the runs in the difference of two means: a row for the true split, eager's first,
    and one for each permutation.
    """
    keys = Draws(0).integers(0, 2**63, (NUM_PERMUTATIONS, 2 * num_runs))
    order = torch.cat([torch.arange(2 * num_runs)[None], keys.argsort(dim=1, stable=True)])
    return torch.where(order < num_runs, -1.0, 1.0).double() / num_runs


def _statistics(calls: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Tensor, float]]:
    """The statistics of one output, from the elements of each run in each call: the name, the Gram
    matrix G of the runs, and the allowance for rounding. T is l' G l for labels l.
    """
    grams = defaultdict(list)
    for outputs in calls:
        values = torch.stack(list(outputs))
        for statistic, gram in _grams(values).items():
            grams[statistic].append(gram)
        if not comparable(values):
            equal = torch.stack([(run == values).sum(1) for run in values])
            grams["frequencies"].append((equal.double(), 0.0))
    for statistic, parts in grams.items():
        matrices, allowed = zip(*parts, strict=True)
        yield statistic, torch.stack(matrices).sum(0), sum(allowed)


def _grams(values: Tensor) -> dict[str, _Gram]:
    """Gram matrix of each statistic with its allowance, for the outputs of one call as
    [run, element], the second half in the next rows of the first.

    A mean may be off by t of its standard deviation s (see `_deviations`), so a product of two by
    the sum of their t, and a distance by t. The allowance is the sum of the squares over the
    elements; of the distances, which it may reach twice, the sum.
    """
    deviation, rounding = _deviations(values)
    spread = deviation.square().mean(0).sqrt()
    squares, off_squares = _scaled(deviation.square() - spread.square(), 2 * rounding * spread)
    scaled, off = _scaled(deviation, rounding)
    means = scaled @ scaled.T
    allowed = float(off.square().sum())
    here, in_next_row = scaled.chunk(2, 1)
    rows = here * in_next_row
    return {
        "means": (means, allowed),
        "variances": (squares @ squares.T, float(off_squares.square().sum())),
        "products of rows": (rows @ rows.T, 2 * allowed),
        "products of elements": (means.square(), 4 * scaled.shape[1] * allowed),
        "distributions": (-torch.cdist(scaled, scaled, p=1), 2 * float(off.sum())),
    }


def _deviations(values: Tensor) -> tuple[Tensor, Tensor]:
    """Deviations of each run from the mean, 0 for elements that are not always finite; and by how
    much rounding may change a mean: the tolerance of the gate, of the element and of the median
    element.
    """
    finite = values.isfinite().all(0)
    wide = torch.where(finite, in_double(values), 0)
    typical = wide.mean(0).abs()[finite].median().nan_to_num()
    if wide.is_complex():
        wide = torch.view_as_real(wide).flatten(1)
    share = 0.0
    if comparable(values):
        share = max(tolerance(dtype_name(values.dtype)), 4 * torch.finfo(values.dtype).eps)
    center = wide.mean(0)
    return wide - center, share * (center.abs() + typical)


def _scaled(deviation: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """Both in units of the standard deviation; 0 for elements that vary by no more than rounding,
    which the gate judges.
    """
    spread = deviation.square().mean(0).sqrt()
    used = spread > rounding
    return torch.where(used, deviation / spread, 0), torch.where(used, rounding / spread, 0)
